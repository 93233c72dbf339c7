"""The head of a request, taken apart. Pure: bytes in, `Head` or BadRequest out.

llhttp is the judge of what is HTTP: request line, field syntax, lengths that contradict each
other. What it lets pass and we do not is refused here; what it would only see once the head is
complete (an endless line, a bare line feed) is refused as soon as it is there.
"""

from __future__ import annotations

import re

from httptools import (
    HttpParserError,
    HttpParserInvalidMethodError,
    HttpParserUpgrade,
    HttpRequestParser,
)

from mmserve.errors import BadRequest

#: Source: Multi Model Server's defaults, section 3.1 of its reference.
MAX_LINE_BYTES = 4096
MAX_HEADERS_BYTES = 8192

#: `Head.length` of a chunked body.
CHUNKED = -1

END = b"\r\n\r\n"

_VERSIONS = {"HTTP/1.1": "1.1", "HTTP/1.0": "1.0"}
_ASKED_FOR = frozenset(
    ("connection", "content-encoding", "content-length", "expect", "host", "transfer-encoding")
)
_CONTROLS = bytes(code for code in (*range(32), 127) if code not in b"\t\r\n")
_NO_CALLBACKS = object()
#: A method that llhttp does not know: to Multi Model Server any token is one (RFC 9110, 9.1).
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}(?= )")


class Head:
    """A request without its body.

    Attributes:
        method, target, path, query, http_version: as in `Request`.
        headers: (name, value) as the client sent them, then `content-length: 0` where it named
            no length: Multi Model Server's handlers see that.
        length: bytes of the body; `CHUNKED` when only its end will tell.
        coding: of the body, lower case; "" for none.
        expectation: value of `Expect`, lower case; "" for none.
        is_kept: the client wants to go on with this connection.
        is_plain: nothing to undo and nothing expected; the length is known.
    """

    __slots__ = (
        "coding",
        "expectation",
        "headers",
        "http_version",
        "is_kept",
        "is_plain",
        "length",
        "method",
        "path",
        "query",
        "target",
    )

    def __init__(self, method: str, target: str, http_version: str) -> None:
        self.method, self.target, self.http_version = method, target, http_version
        self.path, self.query = split_target(target)
        self.headers: list[tuple[str, str]] = []
        self.length = 0
        self.coding = self.expectation = ""
        self.is_kept = http_version == "1.1"
        self.is_plain = True


def refused(why: str) -> BadRequest:
    """The error for what is no HTTP we take; it begins as Multi Model Server's message."""
    return BadRequest(f"Invalid HTTP message. {why}.")


def parse_head(raw: bytes) -> Head:
    """Takes a complete head apart.

    Args:
        raw: from the first byte of the request line to the empty line, both included.

    Raises:
        BadRequest: it is not HTTP/1.1 or 1.0, it is too long, or its framing is ambiguous.
    """
    if len(raw) > MAX_LINE_BYTES:
        _check_length(raw)
    if raw[0] in b"\r\n":
        raise refused("A bare CR or LF before the request line")  # llhttp skips it
    try:
        # A parser of its own for each head (0.3 µs), so that no body has to go through llhttp
        # only to keep its state in step.
        _judge(raw)
    except HttpParserError as error:
        raise refused(str(error).rstrip(".")) from None

    lines = raw.decode("latin-1").split("\r\n")
    try:
        method, target, version = lines[0].split(" ")
        head = Head(method, target, _VERSIONS[version])
    except (ValueError, KeyError):
        raise refused("The request line must be: METHOD TARGET HTTP/1.1") from None

    ours: dict[str, str] = {}
    headers = head.headers
    for line in lines[1:-2]:
        name, _, value = line.partition(":")
        value = value.strip(" \t")
        headers.append((name, value))
        key = name.lower()
        if key in _ASKED_FOR:
            if key == "host" and "host" in ours:
                raise refused("Two Host headers")
            ours[key] = f"{ours[key]}, {value}" if key in ours else value
    _understand(head, ours)
    return head


def _judge(raw: bytes) -> None:
    """Raises HttpParserError where a head is no HTTP."""
    try:
        HttpRequestParser(_NO_CALLBACKS).feed_data(raw)
    except HttpParserUpgrade:
        pass  # CONNECT and Upgrade are requests like any other: the routes refuse or ignore them
    except HttpParserInvalidMethodError:
        if (method := _METHOD.match(raw)) is None or method[0] == b"POST":
            raise
        _judge(b"POST" + raw[method.end() :])


def _understand(head: Head, ours: dict[str, str]) -> None:
    """What the headers in `ours` (lower-case names) mean for framing and connection."""
    if (length := ours.get("content-length")) is not None:
        head.length = int(length)  # digits: llhttp has seen to it
    elif (transfer := ours.get("transfer-encoding")) is not None:
        if transfer.lower() != "chunked":
            raise refused("Transfer-Encoding must be chunked")
        if head.http_version == "1.0":
            raise refused("HTTP/1.0 has no Transfer-Encoding")
        head.length = CHUNKED
        head.is_plain = False
    else:
        head.headers.append(("content-length", "0"))

    if connection := ours.get("connection"):
        options = {option.strip() for option in connection.lower().split(",")}
        head.is_kept = "close" not in options and (head.is_kept or "keep-alive" in options)
    if (coding := ours.get("content-encoding", "").lower()) != "identity" and coding:
        head.coding = coding
        head.is_plain = False
    if expectation := ours.get("expect"):
        head.expectation = expectation.lower()
        head.is_plain = False


def split_target(target: str) -> tuple[str, str]:
    """(path, query) of a request target in any of its forms; both as they came, undecoded."""
    if not target.startswith("/"):
        scheme, mark, rest = target.partition("://")
        if mark and scheme.isalpha():  # absolute form, as sent to a proxy
            authority_end = min((rest.find(c) for c in "/?#" if c in rest), default=len(rest))
            target = rest[authority_end:]
            if not target.startswith("/"):
                target = "/" + target
    target = target.partition("#")[0]
    path, _, query = target.partition("?")
    return path, query


def check_begun(begun: bytes) -> None:
    """Refuses the beginning of a head that no further byte can make good.

    Raises:
        BadRequest: as `parse_head` would once it were complete.
    """
    if len(begun) > MAX_LINE_BYTES:
        _check_length(begun)
    if not head_is_clean(begun):
        raise refused("A bare CR or LF, or a control character")


def head_is_clean(head: bytes) -> bool:
    """No control character but tab and CRLF pairs; a last CR may still wait for its LF."""
    pairs = head.count(b"\r\n")
    returns = head.count(b"\r") - head.endswith(b"\r")
    return pairs == returns == head.count(b"\n") and len(head.translate(None, _CONTROLS)) == len(
        head
    )


def _check_length(head: bytes) -> None:
    line_end = head.find(b"\r\n", 0, MAX_LINE_BYTES + 2)
    if line_end < 0 and len(head) > MAX_LINE_BYTES + 1:
        raise refused(f"The request line is longer than {MAX_LINE_BYTES} bytes")
    if line_end >= 0 and len(head) - line_end - 2 > MAX_HEADERS_BYTES:
        raise refused(f"The headers are longer than {MAX_HEADERS_BYTES} bytes")


def with_length(head: Head, size: int) -> list[tuple[str, str]]:
    """The headers of a body that was de-chunked or inflated to `size` bytes: they describe what is
    handed on, not what was on the wire."""
    gone = ("content-encoding", "transfer-encoding", "content-length")
    kept = [pair for pair in head.headers if pair[0].lower() not in gone]
    kept.append(("content-length", str(size)))
    return kept
