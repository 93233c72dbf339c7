from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import DownloadFailed, InvalidModel, ServeError, StorageFailed
from mmserve.models.orders import MAX_MESSAGE_BYTES, Done, Failed, Frames, failure, frame


@given(st.lists(st.integers(0, 1 << 40), max_size=6), st.lists(st.integers(1, 9)))
def test_messages_survive_any_split(ids: list[int], cuts: list[int]) -> None:
    stream = b"".join(frame(Done(each)) for each in ids)
    frames, found = Frames(), []
    for cut in [*cuts, len(stream)]:
        found += frames.feed(stream[:cut])
        stream = stream[cut:]
    assert [msgspec.msgpack.decode(data, type=Done).id for data in found] == ids


def test_a_message_beyond_measure_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match="a message of"):
        Frames().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "error",
    [
        InvalidModel("Model name is not defined."),
        DownloadFailed("http://h/m.mar", code=404),
        StorageFailed("Failed to write /x: No space left on device (ENOSPC, errno 28)."),
    ],
)
def test_an_error_arrives_as_what_it_was(error: ServeError) -> None:
    arrived = failure(Failed(1, type(error).__name__, str(error)))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)


def test_an_error_that_nobody_knows_is_a_storage_failure() -> None:
    assert type(failure(Failed(1, "Nonsense", "text"))) is StorageFailed
