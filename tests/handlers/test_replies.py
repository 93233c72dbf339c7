from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

numpy = pytest.importorskip("numpy")

from mmserve_handlers import replies  # noqa: E402 - only where numpy is
from mmserve_handlers.contract import BadInput, BadOutput, TooLarge  # noqa: E402
from tests.handlers.calls import Context  # noqa: E402


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(tmp_path)


@pytest.mark.parametrize(
    ("accept", "is_npy"),
    [
        (None, False),
        ("", False),
        ("*/*", False),
        ("text/html", False),
        ("application/json", False),
        ("application/x-npy", True),
        ("Application/X-NPY", True),
        ("application/x-npy;q=0", False),
        ("application/x-npy;q=oops", False),
        ("application/x-npy, */*;q=0.5", True),
        ("application/x-npy, */*", True),
        ("*/*, application/x-npy;q=0.5", False),
        ("application/json, application/x-npy", False),
        ("application/x-npy, application/json", True),
        ("application/json;q=0.5, application/x-npy", True),
        ("application/x-npy;q=0.4 , application/json; q=0.5", False),
        ("application/*, text/plain", False),
    ],
)
def test_the_accept_header_chooses(context: Context, accept: str | None, is_npy: bool) -> None:
    if accept is not None:
        context.headers["accept"] = accept
    body = replies.reply(context, 3, {"a": 1}, numpy.arange(3))
    if is_npy:
        assert context.content_types == {3: "application/x-npy"}
        assert numpy.load(io.BytesIO(body), allow_pickle=False).tolist() == [0, 1, 2]
    else:
        assert context.content_types == {3: "application/json"}
        assert json.loads(body) == {"a": 1}


@given(st.text() | st.lists(st.sampled_from("*/, ;q=0.5application/x-npy"), max_size=40))
def test_any_accept_header_is_read(accept: Any) -> None:
    assert replies.wants_npy(accept if isinstance(accept, str) else "".join(accept)) in (0, 1)


def test_a_result_that_nobody_reads_is_not_made(context: Context) -> None:
    def slow() -> dict[str, Any]:
        raise AssertionError

    context.headers["accept"] = "application/x-npy"
    replies.reply(context, 0, slow, numpy.zeros(1))


def test_without_an_array_there_is_json_for_everybody(context: Context) -> None:
    context.headers["accept"] = "application/x-npy"
    assert json.loads(replies.reply(context, 0, lambda: {"a": 1})) == {"a": 1}
    assert context.content_types == {0: "application/json"}


@pytest.mark.parametrize(
    ("refused", "status", "kind"),
    [
        (BadInput("image", "is no image"), 400, "BadRequestException"),
        (TooLarge("image", "is large"), 413, "RequestTooLargeException"),
        (BadOutput("the model answered NaN"), 500, "InternalServerException"),
    ],
)
def test_an_error_has_a_status_and_is_json_whatever_is_accepted(
    context: Context, refused: Any, status: int, kind: str
) -> None:
    context.headers["accept"] = "application/x-npy"
    body = json.loads(replies.refuse(context, 1, refused))
    assert body == {"code": status, "type": kind, "message": str(refused)}
    assert (context.statuses, context.content_types) == ({1: status}, {1: "application/json"})


def test_tensors_of_every_type_can_be_sent() -> None:
    torch = pytest.importorskip("torch")
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        tensor = torch.arange(4).to(kind).view(2, 2)
        found = numpy.load(io.BytesIO(replies.npy_bytes(tensor)), allow_pickle=False)
        assert found.tolist() == [[0, 1], [2, 3]]
