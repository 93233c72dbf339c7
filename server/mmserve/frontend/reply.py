"""The head of a reply, as Multi Model Server writes it. Pure: a Response in, bytes out.

Source: section 3.1 of the Multi Model Server reference (fixed headers, their order and their
letter case), 8.3 (CORS), quirk D24 (statuses that make no valid status line).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus

from mmserve.frontend.http import Response
from mmserve.frontend.problems import SENDABLE

#: Statuses whose reply has no body, and no length either. Source: RFC 9112, section 6.3.
BODYLESS = frozenset((204, 304))

_FIXED = (
    "Pragma: no-cache\r\n"
    "Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
    "Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
)
_KEPT = "connection: keep-alive\r\n\r\n"
_CLOSED = "connection: close\r\n\r\n"

#: What the edge says itself: a handler's word on these is dropped, be it only the letter case
#: that differs. The last rows would change how the client finds the reply's end.
OWNED = frozenset(
    {
        *("x-request-id", "pragma", "cache-control", "expires", "content-length", "connection"),
        *("keep-alive", "proxy-connection", "transfer-encoding", "trailer", "upgrade"),
    }
)

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f]*")
_REASON = re.compile(r"[\t\x20-\x7e\x80-\xff]+")

#: Where Python's own phrase has changed between its versions, or is a joke.
_PHRASES = {413: "Request Entity Too Large", 418: "Client Error (418)"}
_CLASSES = {2: "Success", 3: "Redirection", 4: "Client Error", 5: "Server Error"}

#: Header lines worth keeping: a handler sets the same few again and again.
_MAX_KEPT_LINES = 512
_MAX_KEPT_VALUE = 128


class Unsendable(ValueError):
    """The reply cannot be put into HTTP; the message names what is wrong."""


class Heads:
    """Writes the heads of one listener's replies.

    Args:
        cors: (name, value) of the CORS headers that every reply carries which has none of its own.
    """

    __slots__ = ("_cors", "_lines", "_starts")

    def __init__(self, cors: Sequence[tuple[str, str]] = ()) -> None:
        self._cors = tuple((name.lower(), header_line(name, value)) for name, value in cors)
        self._starts: dict[int, str] = {}
        self._lines: dict[tuple[str, str], str] = {}

    def write(self, response: Response, request_id: str, length: int, is_kept: bool) -> bytes:
        """Status line and headers, with the empty line.

        Args:
            length: bytes of the body, also where it is not sent because the method is HEAD.
            is_kept: the connection stays open.

        Raises:
            Unsendable: status, header name or header value would not make HTTP.
        """
        status = response.status
        if response.reason:
            start = _start(status, response.reason)
        elif (known := self._starts.get(status)) is not None:
            start = known
        else:
            start = self._starts[status] = _start(status, None)

        own = ""
        if response.headers:
            lines = self._lines
            own = "".join(
                [
                    lines[pair] if pair in lines else self._new_line(pair)
                    for pair in response.headers
                ]
            )
        if self._cors:
            own += self._missing_cors(response)
        size = "" if status in BODYLESS else f"content-length: {length}\r\n"
        end = _KEPT if is_kept else _CLOSED
        return f"{start}{own}x-request-id: {request_id}\r\n{_FIXED}{size}{end}".encode("latin-1")

    def _new_line(self, pair: tuple[str, str]) -> str:
        name, value = pair
        line = header_line(name, value) if name.lower() not in OWNED else ""
        if len(value) <= _MAX_KEPT_VALUE:
            if len(self._lines) >= _MAX_KEPT_LINES:
                self._lines.clear()
            self._lines[pair] = line
        return line

    def _missing_cors(self, response: Response) -> str:
        there = {name.lower() for name, _ in response.headers}
        return "".join([line for name, line in self._cors if name not in there])


def header_line(name: str, value: str) -> str:
    """One field, ready for latin-1; a value beyond latin-1 goes out as UTF-8.

    Raises:
        Unsendable: CR, LF, NUL or another control character, or a name that is no token.
    """
    if not _NAME.fullmatch(name):
        raise Unsendable(f"the header name {name!r} is not a token")
    if not _VALUE.fullmatch(value):
        raise Unsendable(f"the value of the header {name} has a control character")
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        value = value.encode("utf-8", "replace").decode("latin-1")
    return f"{name}: {value}\r\n"


def standard_reason(status: int) -> str:
    """The phrase of a status, and for one without a name Multi Model Server's stand-in."""
    try:
        return _PHRASES.get(status) or HTTPStatus(status).phrase
    except ValueError:
        return f"{_CLASSES.get(status // 100, 'Unknown Status')} ({status})"


def _start(status: int, reason: str | None) -> str:
    if status not in SENDABLE:
        raise Unsendable(f"the status {status} is not one of {SENDABLE[0]} to {SENDABLE[-1]}")
    if not reason or not _REASON.fullmatch(reason):
        reason = standard_reason(status)
    return f"HTTP/1.1 {int(status)} {reason}\r\n"
