"""`head.py`: what is HTTP, and what it means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest
from mmserve.frontend.head import (
    CHUNKED,
    MAX_HEADERS_BYTES,
    MAX_LINE_BYTES,
    check_begun,
    head_is_clean,
    parse_head,
    split_target,
    with_length,
)

NOT_HTTP = {
    "bare LF": b"GET / HTTP/1.1\nHost: x\r\n\r\n",
    "bare LF in a field": b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n",
    "bare CR": b"GET / HTTP/1.1\r\nA: b\rc\r\n\r\n",
    "CR before the request line": b"\rGET / HTTP/1.1\r\n\r\n",
    "folded field": b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
    "folded first field": b"GET / HTTP/1.1\r\n A: b\r\n\r\n",
    "NUL": b"GET / HTTP/1.1\r\nA: b\0c\r\n\r\n",
    "control character": b"GET / HTTP/1.1\r\nA: b\x01c\r\n\r\n",
    "space before the colon": b"GET / HTTP/1.1\r\nA : b\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nA\r\n\r\n",
    "no name": b"GET / HTTP/1.1\r\n: b\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "two equal lengths": b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
    "list of lengths": b"POST / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n",
    "signed length": b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
    "hexadecimal length": b"POST / HTTP/1.1\r\nContent-Length: 0x1\r\n\r\n",
    "length without end": b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
    "empty length": b"POST / HTTP/1.1\r\nContent-Length: \r\n\r\n",
    "length and chunked": b"POST / HTTP/1.1\r\nContent-Length: 1\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n",
    "chunked and length": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Length: 1\r\n\r\n",
    "gzip as transfer coding": b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
    "gzip below chunked": b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "identity as transfer coding": b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n",
    "chunked twice": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n",
    "chunked in two lines": b"POST / HTTP/1.1\r\n"
    + b"Transfer-Encoding: chunked\r\n" * 2
    + b"\r\n",
    "obscured chunked": b"POST / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n",
    "chunked in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\n",
    "version 2.0": b"GET / HTTP/2.0\r\n\r\n",
    "version 0.9": b"GET /\r\n\r\n",
    "version 1.2": b"GET / HTTP/1.2\r\n\r\n",
    "RTSP": b"DESCRIBE / RTSP/1.0\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\n\r\n",
    "space at the end": b"GET / HTTP/1.1 \r\n\r\n",
    "space in the target": b"GET /a b HTTP/1.1\r\n\r\n",
    "control character in the target": b"GET /\x01 HTTP/1.1\r\n\r\n",
    "method that is no token": b"G\xc3\x8bT / HTTP/1.1\r\n\r\n",
    "method with a quote": b'"GET" / HTTP/1.1\r\n\r\n',
    "endless method": b"X" * 65 + b" / HTTP/1.1\r\n\r\n",
    "invented method and another protocol": b"FETCH / RTSP/1.0\r\n\r\n",
    "invented method and a bare LF": b"FETCH / HTTP/1.1\r\nA: b\nC: d\r\n\r\n",
    "invented method and two lengths": b"FETCH / HTTP/1.1\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\n",
    "invented method and a space in the target": b"FETCH /a b HTTP/1.1\r\n\r\n",
    "bare UTF-8 in the path": "GET /é HTTP/1.1\r\n\r\n".encode(),
    "bare UTF-8 in the query": "GET /?é HTTP/1.1\r\n\r\n".encode(),
    "relative target": b"GET foo HTTP/1.1\r\n\r\n",
    "words": b"hello\r\n\r\n",
}


def head_of(*fields: str, line: str = "POST /p HTTP/1.1") -> bytes:
    return "\r\n".join((line, *fields, "", "")).encode("latin-1")


@pytest.mark.parametrize("raw", NOT_HTTP.values(), ids=NOT_HTTP)
def test_what_is_no_http_is_refused_in_the_words_clients_know(raw: bytes) -> None:
    with pytest.raises(BadRequest, match=r"^Invalid HTTP message\. \S"):
        parse_head(raw)


def test_a_head_is_taken_apart() -> None:
    head = parse_head(head_of("Host: x", "X-A:  \t b c \t", "x-a:", "Content-Length: 7"))
    assert (head.method, head.target, head.path, head.query) == ("POST", "/p", "/p", "")
    assert head.headers == [("Host", "x"), ("X-A", "b c"), ("x-a", ""), ("Content-Length", "7")]
    assert (head.length, head.is_plain, head.is_kept) == (7, True, True)


@pytest.mark.parametrize("method", ["get", "FETCH", "Brew", "M-SEARCH", "a!#$%&'*+.^_`|~9"])
def test_any_token_is_a_method(method: str) -> None:
    head = parse_head(head_of("Host: x", "Content-Length: 7", line=f"{method} /p?a HTTP/1.1"))
    assert (head.method, head.path, head.query, head.length) == (method, "/p", "a", 7)


def test_a_missing_host_is_tolerated_and_a_missing_length_is_zero() -> None:
    head = parse_head(head_of(line="GET / HTTP/1.1"))
    assert head.headers == [("content-length", "0")]


def test_header_values_keep_every_byte_of_the_client() -> None:
    raw = "grüße ✓".encode()
    head = parse_head(b"GET / HTTP/1.1\r\nX: " + raw + b"\r\n\r\n")
    assert head.headers[0][1].encode("latin-1") == raw


@pytest.mark.parametrize(
    ("line", "fields", "is_kept"),
    [
        ("GET / HTTP/1.1", (), True),
        ("GET / HTTP/1.1", ("Connection: close",), False),
        ("GET / HTTP/1.1", ("Connection: TE, Close",), False),
        ("GET / HTTP/1.1", ("Connection: keep-alive", "Connection: close"), False),
        ("GET / HTTP/1.1", ("Connection: Upgrade", "Upgrade: websocket"), True),
        ("GET / HTTP/1.0", (), False),
        ("GET / HTTP/1.0", ("Connection: Keep-Alive",), True),
        ("GET / HTTP/1.0", ("Connection: keep-alive, close",), False),
    ],
)
def test_whether_the_client_wants_to_go_on(
    line: str, fields: tuple[str, ...], is_kept: bool
) -> None:
    assert parse_head(head_of(*fields, line=line)).is_kept is is_kept


@pytest.mark.parametrize(
    ("field", "coding", "expectation", "length"),
    [
        ("Transfer-Encoding: Chunked", "", "", CHUNKED),
        ("Content-Encoding: GZIP", "gzip", "", 0),
        ("Expect: 100-Continue", "", "100-continue", 0),
        ("Expect: tea", "", "tea", 0),
    ],
)
def test_what_is_not_plain(field: str, coding: str, expectation: str, length: int) -> None:
    head = parse_head(head_of(field))
    assert (head.coding, head.expectation, head.length) == (coding, expectation, length)
    assert not head.is_plain


def test_identity_is_no_coding() -> None:
    head = parse_head(head_of("Content-Encoding: Identity", "Content-Length: 1"))
    assert (head.coding, head.is_plain) == ("", True)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/", "/", ""),
        ("/a/b%2Fc?x=1?y#z", "/a/b%2Fc", "x=1?y"),
        ("/a#b?c", "/a", ""),
        ("//host/a", "//host/a", ""),
        ("/http://h/x", "/http://h/x", ""),
        ("*", "*", ""),
        ("http://h:1/p?q", "/p", "q"),
        ("HTTP://h", "/", ""),
        ("http://h?q=/", "/", "q=/"),
        ("http://u:p@h#f", "/", ""),
        ("h:443", "h:443", ""),
    ],
)
def test_every_form_of_a_target_has_a_path(target: str, path: str, query: str) -> None:
    assert split_target(target) == (path, query)


@pytest.mark.parametrize("request_line", ["CONNECT h:1 HTTP/1.1", "OPTIONS * HTTP/1.1"])
def test_odd_requests_are_heads_like_others(request_line: str) -> None:
    head = parse_head(head_of("Connection: upgrade", "Upgrade: x", line=request_line))
    assert request_line.startswith(f"{head.method} {head.path} ")


def long_line(size: int) -> bytes:
    return b"GET /" + b"a" * (size - len("GET / HTTP/1.1")) + b" HTTP/1.1\r\n"


def test_the_request_line_has_a_limit() -> None:
    longest, longer = long_line(MAX_LINE_BYTES), long_line(MAX_LINE_BYTES + 1)
    parse_head(longest + b"\r\n")
    for end in range(1, len(longest)):
        check_begun(longest[:end])
    with pytest.raises(BadRequest, match="request line is longer"):
        parse_head(longer + b"\r\n")
    with pytest.raises(BadRequest, match="request line is longer"):
        check_begun(longer)


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\r\n", long_line(MAX_LINE_BYTES)])
def test_the_headers_have_a_limit(line: bytes) -> None:
    field = b"A: " + b"x" * (MAX_HEADERS_BYTES - len(b"A: \r\n\r\n"))
    assert parse_head(line + field + b"\r\n\r\n").method == "GET"
    check_begun(line + field)
    with pytest.raises(BadRequest, match="headers are longer"):
        parse_head(line + field + b"x\r\n\r\n")
    with pytest.raises(BadRequest, match="headers are longer"):
        check_begun(line + field + b"xxxxx")


@pytest.mark.parametrize(
    ("head", "is_clean"),
    [
        (b"", True),
        (b"GET", True),
        (b"GET / HTTP/1.1\r", True),
        (b"GET / HTTP/1.1\r\nA:\tb\xff\r\n", True),
        (b"\n", False),
        (b"GET\r/", False),
        (b"GET\r\r", False),
        (b"GET\n\r", False),
        (b"\x16\x03\x01", False),
        (b"GET \0", False),
        (b"GET \x7f", False),
    ],
)
def test_a_beginning_that_cannot_become_http_is_seen(head: bytes, is_clean: bool) -> None:
    assert head_is_clean(head) is is_clean


@given(st.lists(st.sampled_from(["A: b", "Host: x", "C:", "Content-Length: 3"]), unique=True))
def test_no_beginning_of_a_good_head_is_refused(fields: list[str]) -> None:
    raw = head_of(*fields)
    parse_head(raw)
    for end in range(len(raw)):
        check_begun(raw[:end])


def test_headers_handed_on_describe_the_body_handed_on() -> None:
    head = parse_head(head_of("X: y", "Content-Encoding: gzip", "Content-Length: 9", "Z: z"))
    assert with_length(head, 100) == [("X", "y"), ("Z", "z"), ("content-length", "100")]
    head = parse_head(head_of("transfer-encoding: chunked"))
    assert with_length(head, 5) == [("content-length", "5")]
