"""Frames: bytes ↔ messages, right for any split of the bytes."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.wire.framing import PREFIX, Decoder, WireError, cut, encode
from mmserve.wire.messages import (
    Hello,
    Item,
    Load,
    Loaded,
    LoadFailed,
    Outcome,
    Parameter,
    Predict,
    Replies,
    ToFront,
    ToWorker,
)

text = st.text(max_size=20)
headers = st.lists(st.tuples(text, text), max_size=3)
sizes = st.integers(0, 1 << 40)
items = st.builds(
    Item, text, headers, st.lists(st.builds(Parameter, text, sizes, st.none() | text), max_size=3)
)
outcomes = st.builds(
    Outcome,
    st.integers(100, 999),
    sizes,
    st.none() | text,
    headers,
    st.none() | text,
    st.booleans(),
    st.booleans(),
)
messages = st.one_of(
    st.builds(Hello, st.integers(1, 1 << 22), text),
    st.builds(Loaded, st.floats(0, 1e6), st.lists(text, max_size=2), st.booleans(), text),
    st.builds(LoadFailed, text, st.booleans(), text),
    st.builds(
        Replies,
        sizes,
        st.lists(outcomes, max_size=3),
        st.lists(text, max_size=2),
        st.floats(0, 1e6),
        sizes,
    ),
)
to_worker = st.one_of(
    st.builds(
        Load,
        text,
        text,
        text,
        st.integers(1, 64),
        st.none() | st.integers(0, 8),
        text,
        st.booleans(),
        sizes,
        st.dictionaries(text, text, max_size=2),
    ),
    st.builds(Predict, sizes, st.lists(items, max_size=3)),
)
payloads = st.lists(st.binary(max_size=200), max_size=4)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(data) + 1) for at in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(st.tuples(messages, payloads), max_size=5), st.lists(st.integers(0, 9999)))
def test_what_is_encoded_comes_out_once_and_in_order_however_it_is_split(
    sent: list[tuple[msgspec.Struct, list[bytes]]], cuts: list[int]
) -> None:
    stream = b"".join(bytes(part) for message, parts in sent for part in encode(message, parts))
    decoder: Decoder[msgspec.Struct] = Decoder(ToFront)
    got = [frame for data in split(stream, cuts) for frame in decoder.feed(data)]
    assert [(message, bytes(payload)) for message, payload in got] == [
        (message, b"".join(parts)) for message, parts in sent
    ]


@given(to_worker, payloads)
def test_a_stream_taken_byte_by_byte_means_the_same(
    message: msgspec.Struct, parts: list[bytes]
) -> None:
    stream = b"".join(encode(message, parts))
    decoder: Decoder[msgspec.Struct] = Decoder(ToWorker)
    frames: list[tuple[msgspec.Struct, memoryview]] = []
    for at in range(len(stream)):
        assert frames == []
        frames += decoder.feed(stream[at : at + 1])
    assert [(got, bytes(payload)) for got, payload in frames] == [(message, b"".join(parts))]


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_any_bytes_are_frames_or_a_wire_error(chunks: list[bytes]) -> None:
    decoder: Decoder[msgspec.Struct] = Decoder(ToFront)
    try:
        for data in chunks:
            decoder.feed(data)
    except WireError:
        pass


def test_a_payload_stays_good_while_later_frames_come() -> None:
    decoder: Decoder[Hello] = Decoder(Hello)
    stream = b"".join(encode(Hello(1, "fork"), [b"first"]))
    kept = [decoder.feed(stream[:20]), decoder.feed(stream[20:] + stream), decoder.feed(stream)]
    assert [bytes(payload) for frames in kept for _, payload in frames] == [b"first"] * 3


@pytest.mark.parametrize("header, payload", [(101, 0), (5, 1001), (2**32 - 1, 2**64 - 1)])
def test_sizes_above_the_limits_are_refused_before_anything_is_read(
    header: int, payload: int
) -> None:
    decoder: Decoder[Hello] = Decoder(Hello, max_header=100, max_payload=1000)
    prefix = PREFIX.pack(header, payload)
    decoder.feed(prefix[:7])
    with pytest.raises(WireError, match=f"header of {header} and a payload of {payload} bytes"):
        decoder.feed(prefix[7:])


def test_no_room_is_made_for_bytes_that_are_only_announced() -> None:
    decoder: Decoder[Hello] = Decoder(Hello, max_payload=1 << 63)
    assert decoder.feed(PREFIX.pack(5, 1 << 62) + b"x") == []


@pytest.mark.parametrize(
    "header",
    [b"", b"\xc1", msgspec.msgpack.encode("hello"), msgspec.msgpack.encode(["nobody", 1])],
)
def test_a_header_that_is_no_message_is_a_wire_error(header: bytes) -> None:
    decoder: Decoder[msgspec.Struct] = Decoder(ToFront)
    with pytest.raises(WireError, match="no message"):
        decoder.feed(PREFIX.pack(len(header), 0) + header)


def test_large_parts_are_not_copied() -> None:
    body = bytearray(1 << 20)
    _, part = encode(Hello(1, "fork"), [body])
    assert part is body


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_a_payload_is_cut_where_it_was_joined(parts: list[bytes]) -> None:
    assert [bytes(part) for part in cut(b"".join(parts), map(len, parts))] == parts


@pytest.mark.parametrize("sizes", [[], [2], [4], [1, 3], [-1, 4], [4, -1]])
def test_sizes_that_do_not_add_up_are_a_wire_error(sizes: list[int]) -> None:
    with pytest.raises(WireError):
        cut(b"abc", sizes)
