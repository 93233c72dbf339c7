"""A small real HTTP server, and generators of what servers say."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest


class TinyServer:
    """Answers by path, and counts what it saw.

    `/ok` 200, `/refuse` 503 and a closed connection, `/cut` a connection closed without a reply,
    `/never` nothing at all, `/held` 200 once `release` was called.
    """

    def __init__(self) -> None:
        self.seen = Counter[str]()
        self.connections = 0
        self._released, self._news = asyncio.Event(), asyncio.Condition()
        self._serving = set[asyncio.Task[None]]()

    async def saw(self, count: int) -> None:
        """Returns when it has seen so many requests."""
        async with self._news:
            await self._news.wait_for(lambda: self.seen.total() >= count)

    def release(self) -> None:
        self._released.set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Gives `http://127.0.0.1:PORT`."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            try:
                yield f"http://127.0.0.1:{port}"
            finally:
                for task in self._serving:
                    task.cancel()
                await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._serving.add(cast("asyncio.Task[None]", asyncio.current_task()))
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"content-length: " in head:
                    await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                path = head.split()[1].decode()
                async with self._news:
                    self.seen[path] += 1
                    self._news.notify_all()
                if path == "/held":
                    await self._released.wait()
                if path == "/cut":
                    break
                if path == "/refuse":
                    writer.write(
                        b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                    )
                    break
                if path != "/never":
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
def tiny_server() -> Callable[[], TinyServer]:
    return TinyServer
