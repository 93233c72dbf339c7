"""`chunks.py` against llhttp, which reads the same bytes."""

import itertools

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest, BodyTooLarge
from mmserve.frontend.chunks import MAX_EXTRAS_BYTES, Chunks

HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMIT = 10_000


def undo(pieces: list[bytes], limit: int = LIMIT) -> tuple[bytes, bytes | None]:
    """(body, what follows it; None while it is not complete)."""
    chunks, body, rest = Chunks(limit), bytearray(), None
    for piece in pieces:
        if rest is None:
            rest = chunks.feed(piece, body.extend)
        else:
            rest += piece
    return bytes(body), rest


class Sink:
    def __init__(self) -> None:
        self.body, self.is_complete = b"", False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def judge(data: bytes) -> bytes | None:
    """The body llhttp reads out of a complete one; None when it refuses."""
    sink = Sink()
    try:
        httptools.HttpRequestParser(sink).feed_data(HEAD + data)
    except httptools.HttpParserError:
        return None
    return sink.body if sink.is_complete else None


extensions = st.sampled_from([b"", b";a", b";a=b", b';a="b c;\\""', b";a;b=c"])
trailers = st.lists(st.sampled_from([b"X: y\r\n", b"Digest:\r\n", b"a: \xc3\xa9\r\n"]), max_size=3)


@st.composite
def coded(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(body, the body chunked)."""
    parts = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    data = b"".join(
        b"%s%s\r\n%s\r\n" % (draw(st.sampled_from([b"%x", b"%X", b"%04x"])) % len(part), ext, part)
        for part in parts
        for ext in [draw(extensions)]
    )
    end = b"0" + draw(extensions) + b"\r\n" + b"".join(draw(trailers)) + b"\r\n"
    return b"".join(parts), data + end


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(one, len(data)) for one in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(coded(), st.binary(max_size=20), st.lists(st.integers(0, 300), max_size=8))
def test_any_split_gives_the_body_and_what_follows(
    case: tuple[bytes, bytes], behind: bytes, at: list[int]
) -> None:
    body, data = case
    assert judge(data) == body
    assert undo(cut(data + behind, at)) == (body, behind)


@given(coded(), st.integers(0, 300), st.binary(min_size=1, max_size=3))
def test_what_llhttp_refuses_is_refused(case: tuple[bytes, bytes], at: int, bad: bytes) -> None:
    data = bytearray(case[1])
    data[at % len(data) : at % len(data) + len(bad)] = bad
    try:
        body, rest = undo([bytes(data)])
    except (BadRequest, BodyTooLarge):
        return
    if rest is not None:
        whole = bytes(data[: len(data) - len(rest)])
        assert judge(whole) == body
        assert undo([bytes([byte]) for byte in data]) == (body, rest)


MALFORMED = {
    "no size": b"\r\n",
    "not hexadecimal": b"xyz\r\n",
    "negative": b"-1\r\n",
    "prefixed": b"0x1\r\na\r\n0\r\n\r\n",
    "space before": b" 1\r\na\r\n0\r\n\r\n",
    "space behind": b"1 \r\na\r\n0\r\n\r\n",
    "bare LF": b"1\na\r\n0\r\n\r\n",
    "bare CR": b"1\ra",
    "longer than said": b"1\r\nab\r\n0\r\n\r\n",
    "LF behind the data": b"1\r\na\n0\r\n\r\n",
    "too many digits": b"0" * 16 + b"1\r\n",
    "empty extension": b"1;\r\na\r\n0\r\n\r\n",
    "trailer without colon": b"0\r\nabc\r\n\r\n",
    "folded trailer": b"0\r\na: b\r\n c\r\n\r\n",
    "trailer with NUL": b"0\r\na: \0\r\n\r\n",
    "endless size line": b"1;" + b"a" * MAX_EXTRAS_BYTES,
    "endless extensions": b"1;aaaaaaaaaaaaaaa\r\nx\r\n" * (MAX_EXTRAS_BYTES // 16 + 1),
    "endless trailers": b"0\r\n" + b"a: bbbbbbbbbbbbb\r\n" * (MAX_EXTRAS_BYTES // 16 + 1),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_malformed_chunks_are_refused(data: bytes, in_pieces: bool) -> None:
    pieces = [bytes([byte]) for byte in data] if in_pieces else [data]
    with pytest.raises(BadRequest, match=r"^Invalid HTTP message\."):
        undo(pieces)


def test_the_limit_counts_the_body_and_is_met_before_the_chunk_comes() -> None:
    data = b"5\r\nhello\r\n5\r\nworld\r\n0\r\n\r\n"
    assert undo([data], limit=10) == (b"helloworld", b"")
    got = bytearray()
    with pytest.raises(BodyTooLarge, match="9 bytes"):
        Chunks(9).feed(b"5\r\nhello\r\n5\r\n", got.extend)
    assert got == b"hello"
