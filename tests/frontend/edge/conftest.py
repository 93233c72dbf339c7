"""The edge on real sockets: a loop in a thread, and a client that shows every byte."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar

import pytest
import uvloop

from mmserve.config.addresses import Address
from mmserve.frontend.http import Exchange, Response
from mmserve.frontend.listener import Listener, install_exception_handler, open_listener

T = TypeVar("T")
PATIENCE_S = 20.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


class House:
    """An event loop in a thread, and the listeners in it."""

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop_factory = loop_factory
        self._ready: queue.Queue[None] = queue.Queue()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        self._ready.get(timeout=PATIENCE_S)

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self.loop = asyncio.get_running_loop()
        install_exception_handler(self.loop)
        self._end = asyncio.Event()
        async with contextlib.AsyncExitStack() as self._stack:
            self._ready.put(None)
            await self._end.wait()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the loop's thread."""

        async def call() -> T:
            return function(*arguments)

        return self.run(call())

    def open(self, application: Callable[[Exchange], None], **options: Any) -> Listener:
        address = options.pop("address", Address("http", "127.0.0.1", 0))

        async def enter() -> Listener:
            return await self._stack.enter_async_context(
                open_listener(address, application, **options)
            )

        return self.run(enter())

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture(params=LOOPS)
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    house = House(LOOPS[request.param])
    yield house
    house.close()


@dataclass
class Reply:
    status: int
    reason: str
    headers: dict[str, str]
    head: bytes
    body: bytes

    def error(self) -> tuple[str, str]:
        """(type, message) of an error body, whose shape is checked."""
        assert self.headers["content-type"] == "application/json"
        assert self.body.endswith(b"}\n")
        told = json.loads(self.body)
        assert told["code"] == self.status
        return told["type"], told["message"]


class Client:
    """One connection."""

    def __init__(self, where: Listener | int | str | socket.socket) -> None:
        if isinstance(where, Listener):
            where = where.address.path or where.port
        if isinstance(where, socket.socket):
            self.socket = where
        elif isinstance(where, str):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(where)
        else:
            self.socket = socket.create_connection(("127.0.0.1", where))
        self.socket.settimeout(PATIENCE_S)
        self._rest = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self, *, has_body: bool = True) -> Reply:
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            self._more()
        head = self._take(end + 4)[:-4]
        first, *lines = head.decode("latin-1").split("\r\n")
        _, status, reason = first.split(" ", 2)
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, "a header twice"
            headers[name.lower()] = value
        size = int(headers.get("content-length", 0)) if has_body else 0
        while len(self._rest) < size:
            self._more()
        return Reply(int(status), reason, headers, head, self._take(size))

    def _take(self, size: int) -> bytes:
        taken = bytes(self._rest[:size])
        del self._rest[:size]
        return taken

    def ask(self, data: bytes, *, has_body: bool = True) -> Reply:
        self.send(data)
        return self.reply(has_body=has_body)

    def is_closed(self) -> bool:
        """Waits for the end-of-file. Raises TimeoutError where none comes."""
        if self._rest:
            return False
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def _more(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise EOFError(self._rest)
        self._rest += data


class Inbox:
    """An application that keeps what it is asked until the test answers."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._asked: queue.Queue[Exchange] = queue.Queue()
        self.gone: queue.Queue[Exchange] = queue.Queue()

    def __call__(self, exchange: Exchange) -> None:
        exchange.on_gone = lambda: self.gone.put(exchange)
        self._asked.put(exchange)

    def next(self) -> Exchange:
        return self._asked.get(timeout=PATIENCE_S)

    def is_empty(self) -> bool:
        """Whether nothing is there once the loop has done what it had to do."""
        self._house.call(lambda: None)
        return self._asked.empty()

    def answer(self, exchange: Exchange, response: Response) -> None:
        self._house.call(exchange.reply, response)


@pytest.fixture
def inbox(house: House) -> Inbox:
    return Inbox(house)


@dataclass
class Observed:
    """What the observer was told: (method, target, status, bytes)."""

    lines: list[tuple[str, str, int, int]] = field(default_factory=list)

    def __call__(self, exchange: Exchange, status: int, elapsed_s: float, size: int) -> None:
        assert 0 <= elapsed_s < PATIENCE_S
        self.lines.append((exchange.request.method, exchange.request.target, status, size))


@pytest.fixture
def observed() -> Observed:
    return Observed()


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """This module: tests cannot import it by name."""
    return sys.modules[__name__]


@pytest.fixture(scope="session")
def fuzz() -> ModuleType:
    """`tests/fuzz/fuzz_edge.py`, which drives a connection without a socket."""
    path = Path(__file__).parents[2] / "fuzz" / "fuzz_edge.py"
    spec = importlib.util.spec_from_file_location("fuzz_edge", path)
    assert spec
    assert spec.loader
    module = sys.modules["fuzz_edge"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def eventually(question: Callable[[], bool]) -> None:
    """Waits for what no event tells of."""
    end = time.monotonic() + PATIENCE_S
    while not question():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)
