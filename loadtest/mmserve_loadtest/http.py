"""HTTP/1.1 from the client's side, without sockets: requests to bytes, bytes to replies.

Only as much as a load generator needs, so that one core can send several times what any server
under test can answer.

Source: RFC 9112, sections 4 (status line), 6 (body length) and 7.1 (chunked).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
HEAD_LIMIT_BYTES = 64 * 1024
BODILESS = frozenset((204, 304))


class BadReply(Exception):
    """The peer's bytes are no HTTP/1.1 reply; the message says what is wrong with them."""


class Target(NamedTuple):
    """Where a request goes.

    Attributes:
        host: name or address, or the path of a unix socket.
        port: TCP port, 0 for a unix socket.
        path: request target, path and query.
    """

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Text of the Host header."""
        if not self.port:
            return "localhost"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Target:
    """The target of an `http://` URL.

    Raises:
        ValueError: another scheme, or no host.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL of the form http://HOST[:PORT]/PATH")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.hostname, parts.port or 80, path)


def request_bytes(
    method: str,
    target: Target,
    body: bytes = b"",
    headers: Iterable[tuple[str, str]] | Mapping[str, str] = (),
) -> bytes:
    """One request; Host and, where there is a body or the method implies one, Content-Length."""
    pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
    named = {name.lower() for name, _ in pairs}
    lines = [f"{method} {target.path} HTTP/1.1"]
    if "host" not in named:
        lines.append(f"Host: {target.authority}")
    lines += [f"{name}: {value}" for name, value in pairs]
    if (body or method in ("POST", "PUT", "PATCH")) and not named & {
        "content-length",
        "transfer-encoding",
    }:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("utf-8") + body


class Reply(NamedTuple):
    """One complete reply.

    Attributes:
        status: as sent.
        closes: the connection cannot carry another request.
        head: status line and header lines, without the blank line.
        body: de-chunked.
    """

    status: int
    closes: bool
    head: bytes
    body: bytes

    @property
    def reason(self) -> str:
        return self.head.partition(b"\r\n")[0].decode("latin-1").partition(" ")[2].partition(" ")[2]

    @property
    def headers(self) -> list[tuple[str, str]]:
        """(name, value) in the order and letter case of the server."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]

    def header(self, name: str) -> str | None:
        """The first value of a header, whatever its letter case."""
        wanted = name.lower()
        return next((value for key, value in self.headers if key.lower() == wanted), None)


class ReplyReader:
    """Cuts the bytes of one connection into replies, wherever they were split.

    Args:
        bodiless: the requests are HEAD requests, whose replies never have a body.
    """

    def __init__(self, *, bodiless: bool = False) -> None:
        self._bodiless = bodiless
        self._buffer = bytearray()
        self._need = 0  # bytes the buffer must hold before looking again is worth while

    @property
    def has_part(self) -> bool:
        """Whether a reply has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that `data` completes; interim 1xx replies are left out.

        Raises:
            BadReply: this is not HTTP/1.1.
        """
        buffer = self._buffer
        if not buffer:
            # The common case: one chunk is one reply, and nothing needs copying.
            found = self._cut(data, 0)
            if found is not None and found[1] == len(data):
                return [found[0]] if found[0].status >= 200 else []
        buffer += data
        if len(buffer) < self._need:
            return []
        self._need = 0
        whole, at, replies = bytes(buffer), 0, list[Reply]()
        while at < len(whole) and (found := self._cut(whole, at)):
            reply, at = found
            if reply.status >= 200:
                replies.append(reply)
        del buffer[:at]
        return replies

    def finish(self) -> Reply | None:
        """End of file: the reply whose body ends with the connection, if there is one.

        Raises:
            BadReply: the reply was cut off.
        """
        if not self._buffer:
            return None
        whole = bytes(self._buffer)
        self._buffer.clear()
        head_end = whole.find(HEAD_END)
        if head_end >= 0:
            head = whole[:head_end]
            fields = head.lower()
            if b"\r\ncontent-length:" not in fields and b"\r\ntransfer-encoding:" not in fields:
                return Reply(_status(head), True, head, whole[head_end + 4 :])
        raise BadReply(f"the connection ended inside a reply, after {len(whole)} bytes")

    def _cut(self, data: bytes, start: int) -> tuple[Reply, int] | None:
        """The reply that begins at `start` and where it ends, or None while it is incomplete."""
        head_end = data.find(HEAD_END, start)
        if head_end < 0:
            if len(data) - start > HEAD_LIMIT_BYTES:
                raise BadReply(f"no end of the reply head within {HEAD_LIMIT_BYTES} bytes")
            return None
        head = data[start:head_end]
        status = _status(head)
        fields = head.lower()
        closes = b"\r\nconnection: close" in fields or head.startswith(b"HTTP/1.0")
        body_at = head_end + 4
        if self._bodiless or status < 200 or status in BODILESS:
            return Reply(status, closes, head, b""), body_at
        at = fields.find(b"\r\ncontent-length:")
        if at >= 0:
            line_end = fields.find(b"\r\n", at + 2)
            text = fields[at + 17 : line_end if line_end >= 0 else None]
            try:
                end = body_at + int(text)
            except ValueError:
                raise BadReply(f"content-length is {text.decode('latin-1')!r}") from None
            if len(data) < end:
                self._need = end - start
                return None
            return Reply(status, closes, head, data[body_at:end]), end
        if b"\r\ntransfer-encoding:" in fields:
            cut = _chunks(data, body_at)
            return cut and (Reply(status, closes, head, cut[0]), cut[1])
        return None  # the body ends with the connection: `finish`


def _status(head: bytes) -> int:
    """The status code of a reply head."""
    if not head.startswith(b"HTTP/1.") or not head[9:12].isdigit():
        raise BadReply(f"no HTTP/1.1 status line: {head[:60].decode('latin-1')!r}")
    if head[12:13] in b" \r":
        return int(head[9:12])
    # Servers exist that send codes of four digits.
    return int(head[9:].split(maxsplit=1)[0])


def _chunks(data: bytes, at: int) -> tuple[bytes, int] | None:
    """A chunked body from `at` and where it ends, or None while it is incomplete."""
    parts = []
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        try:
            size = int(data[at:line_end].partition(b";")[0], 16)
        except ValueError:
            raise BadReply("a chunk has no size") from None
        at = line_end + 2
        if size == 0:
            break
        if len(data) < at + size + 2:
            return None
        parts.append(data[at : at + size])
        at += size + 2
    while True:  # trailer fields, then a blank line
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        is_blank, at = line_end == at, line_end + 2
        if is_blank:
            return b"".join(parts), at
