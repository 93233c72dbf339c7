"""Requests to bytes, bytes to replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve_loadtest.http import BadReply, Reply, ReplyReader, Target, parse_url, request_bytes

BODIES = st.binary(max_size=300)


def with_length(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d Word\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


def chunked(status: int, body: bytes, size: int) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 %d Word\r\ntransfer-encoding: chunked\r\n\r\n" % status
    return head + coded + b"0\r\nx-trailer: 1\r\n\r\n"


@st.composite
def replies(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The bytes of some replies, and what is in them."""
    stream, expected = b"", []
    for _ in range(draw(st.integers(1, 4))):
        status, body = draw(st.sampled_from([200, 202, 404, 507])), draw(BODIES)
        kind = draw(st.sampled_from(["length", "chunked", "after 100", "bodiless"]))
        if kind == "chunked":
            stream += chunked(status, body, draw(st.integers(1, 50)))
        elif kind == "bodiless":
            status, body = 204, b""
            stream += b"HTTP/1.1 204 No Content\r\n\r\n"
        else:
            stream += b"HTTP/1.1 100 Continue\r\n\r\n" * (kind == "after 100")
            stream += with_length(status, body)
        expected.append((status, body))
    return stream, expected


@given(replies(), st.data())
def test_replies_come_out_the_same_wherever_the_bytes_were_split(
    said: tuple[bytes, list[tuple[int, bytes]]], data: st.DataObject
) -> None:
    stream, expected = said
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    reader, got = ReplyReader(), list[Reply]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += reader.feed(stream[start:end])
    assert [(reply.status, reply.body) for reply in got] == expected
    assert not reader.has_part


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reader = ReplyReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\nx-a: 1\r\n\r\nsome") == []
    assert reader.feed(b" more") == []
    last = reader.finish()
    assert last is not None
    assert (last.body, last.closes, last.header("X-A")) == (b"some more", True, "1")


def test_a_reply_to_head_has_no_body_whatever_its_length_says() -> None:
    (reply,) = ReplyReader(bodiless=True).feed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
    assert (reply.status, reply.body) == (200, b"")


def test_reason_headers_and_the_end_of_the_connection_are_told() -> None:
    (reply,) = ReplyReader().feed(
        b"HTTP/1.1 210 Partial Success\r\nX-Up: A\r\nConnection: close\r\ncontent-length: 0\r\n\r\n"
    )
    assert reply.reason == "Partial Success"
    assert reply.headers == [("X-Up", "A"), ("Connection", "close"), ("content-length", "0")]
    assert reply.closes


def test_an_empty_reason_phrase_is_empty() -> None:
    (reply,) = ReplyReader().feed(b"HTTP/1.1 200 \r\ncontent-length: 0\r\n\r\n")
    assert (reply.status, reply.reason) == (200, "")


@pytest.mark.parametrize(
    "said",
    [
        b"hello\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(said: bytes) -> None:
    with pytest.raises(BadReply):
        ReplyReader().feed(said)


def test_a_reply_that_was_cut_off_is_no_reply() -> None:
    reader = ReplyReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab")
    with pytest.raises(BadReply, match="ended inside"):
        reader.finish()


def test_requests_carry_host_and_length() -> None:
    target = parse_url("http://127.0.0.1:8080/predictions/m?a=1")
    assert target == Target("127.0.0.1", 8080, "/predictions/m?a=1")
    assert request_bytes("POST", target, b"x", {"X-A": "b"}) == (
        b"POST /predictions/m?a=1 HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nX-A: b\r\n"
        b"Content-Length: 1\r\n\r\nx"
    )
    assert b"Content-Length" not in request_bytes("GET", target)
    assert b"Content-Length: 0" in request_bytes("PUT", target)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://a/", "http://", "ftp://a/"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST"):
        parse_url(url)
