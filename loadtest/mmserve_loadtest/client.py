"""One request on a connection of its own: for management calls and single questions."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping

from mmserve_loadtest.http import BadReply, Reply, ReplyReader, parse_url, request_bytes

CHUNK_BYTES = 256 * 1024


class NoReply(Exception):
    """The peer closed the connection, or nothing complete came in time."""


def call(
    method: str,
    url: str,
    body: bytes = b"",
    headers: Iterable[tuple[str, str]] | Mapping[str, str] = (),
    *,
    timeout_s: float = 60.0,
) -> Reply:
    """Sends one request.

    Raises:
        OSError: no connection.
        NoReply, BadReply: no reply, or none that is HTTP.
    """
    target = parse_url(url)
    request = request_bytes(method, target, body, headers)
    with Connection((target.host, target.port), timeout_s=timeout_s) as connection:
        connection.send(request)
        return connection.reply(bodiless=method == "HEAD")


class Connection:
    """A blocking connection for bytes that are a request, or are not.

    Args:
        timeout_s: for the connection to come up, and for each whole reply.
    """

    def __init__(self, address: tuple[str, int], *, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.create_connection(address, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._waiting: list[Reply] = []

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """A peer that has already answered and closed may be sent to; what it said is kept."""
        self._socket.settimeout(self._timeout_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def reply(self, *, bodiless: bool = False) -> Reply:
        """The next complete reply; interim ones are left out.

        Raises:
            NoReply, BadReply
        """
        reader, until = ReplyReader(bodiless=bodiless), time.monotonic() + self._timeout_s
        while not self._waiting:
            data = self._receive(until)
            if not data:
                last = reader.finish()
                if last is None:
                    raise NoReply("the connection was closed without a reply")
                return last
            self._waiting = reader.feed(data)
        return self._waiting.pop(0)

    def is_closed_within(self, limit_s: float) -> bool:
        """Whether the peer closes the connection; anything it still says is dropped."""
        until = time.monotonic() + limit_s
        with contextlib.suppress(NoReply):
            while self._receive(until):
                pass
            return True
        return False

    def _receive(self, until: float) -> bytes:
        """Some bytes; none at the end of the stream."""
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise NoReply("no complete reply in time")
        self._socket.settimeout(left_s)
        try:
            return self._socket.recv(CHUNK_BYTES)
        except ConnectionResetError:
            return b""
        except TimeoutError:
            raise NoReply("no complete reply in time") from None


__all__ = ["BadReply", "Connection", "NoReply", "Reply", "call"]
