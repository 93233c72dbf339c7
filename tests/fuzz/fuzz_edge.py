"""Any bytes against the HTTP edge, without a socket.

`one_input(data)` takes what a fuzzer made and raises AssertionError where the edge misbehaves:
an exception escapes, the same bytes in other pieces give other exchanges, or what it writes is
not a row of HTTP replies.

By hand: `python tests/fuzz/fuzz_edge.py [SECONDS] [SEED]`.
"""

from __future__ import annotations

import asyncio
import gzip
import random
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import httptools

from mmserve.frontend.edge import Connection, Edge, Limits
from mmserve.frontend.http import Exchange, Response

LIMITS = Limits(max_body_bytes=300)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class MemoryTransport(asyncio.Transport):
    """A transport whose other end is a list of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = self.is_cut = self.is_paused = self.has_ended = False
        self.unsent = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override] # typeshed: memoryview[Any]
        assert not self.is_closed, "written after the end"
        assert not self.has_ended, "written after end-of-file"
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_ended = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = self.is_cut = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        assert not self.is_paused, "paused twice"
        self.is_paused = True

    def resume_reading(self) -> None:
        assert self.is_paused, "resumed twice"
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return self.unsent


@dataclass
class Outcome:
    """What came of one stream of bytes.

    Attributes:
        asked: (method, target, headers, body) of each exchange the application saw.
        told: (status, method) of each reply, those of the edge itself included.
        written: all that was written.
        is_closed: the server ended the connection, or at least its half.
    """

    asked: list[tuple[str, str, list[tuple[str, str]], bytes]] = field(default_factory=list)
    told: list[tuple[int, str]] = field(default_factory=list)
    written: bytes = b""
    is_closed: bool = False


def drive(
    pieces: Iterable[bytes], *, answers_late: bool = False, limits: Limits = LIMITS
) -> Outcome:
    """Feeds one connection. With `answers_late` the application answers a request only when
    nothing more can be read, or nothing is left to read."""
    return asyncio.run(_drive(pieces, answers_late, limits))


async def _drive(pieces: Iterable[bytes], answers_late: bool, limits: Limits) -> Outcome:
    outcome = Outcome()
    waiting: deque[Exchange] = deque()

    def application(exchange: Exchange) -> None:
        request = exchange.request
        outcome.asked.append((request.method, request.target, request.headers, request.body))
        waiting.append(exchange)
        assert len(waiting) == 1, "two requests of a connection in work"
        if not answers_late:
            answer()

    def answer() -> None:
        exchange = waiting.popleft()
        status = 404 if exchange.request.path == "/nope" else 200
        exchange.reply(Response(status, exchange.request.body))

    def observer(exchange: Exchange, status: int, elapsed_s: float, size: int) -> None:
        assert elapsed_s >= 0
        assert size > 0
        assert len(exchange.request.id) == 36
        outcome.told.append((status, exchange.request.method))

    edge = Edge(application, limits, observer=observer)
    connection, transport = Connection(edge, "0.0.0.0"), MemoryTransport()
    connection.connection_made(transport)

    async def settle() -> None:
        """Answers all that waits, as often as an answer brings another request."""
        while waiting:
            answer()
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the edge puts off the rest of a long row of requests

    for piece in pieces:
        while transport.is_paused:
            await settle()
        if transport.is_closed:
            break
        connection.data_received(piece)
    for _ in range(100):
        await settle()
    outcome.written = bytes(transport.written)
    outcome.is_closed = transport.is_closed or transport.has_ended
    connection.connection_lost(None)
    assert not edge.connections
    return outcome


def statuses(written: bytes, methods: Sequence[str]) -> list[int]:
    """Reads a row of replies. Raises httptools.HttpParserError when they are none."""
    found: list[int] = []
    rest = written.replace(CONTINUE, b"")
    for method in methods:
        if not rest:
            break
        head, mark, rest = rest.partition(b"\r\n\r\n")
        assert mark, "a reply was cut off"
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(fields[b"content-length"])
        parser = httptools.HttpResponseParser(object())
        parser.feed_data(head + mark)
        found.append(parser.get_status_code())
        if method != "HEAD":
            assert len(rest) >= size, "a body was cut off"
            rest = rest[size:]
    assert not rest, "more replies than requests"
    return found


def one_input(data: bytes) -> None:
    """Byte 0 seeds the cuts; the rest is what the client sends."""
    seed, stream = data[:1], data[1:]
    if not stream:
        return
    whole = drive([stream])
    told = [status for status, _ in whole.told]
    assert len(told) - len(whole.asked) in (0, 1), "at most one error, and it is the last"
    assert statuses(whole.written, [method for _, method in whole.told]) == told
    assert all(len(body) <= LIMITS.max_body_bytes for *_, body in whole.asked)
    if told and told[-1] >= 400:
        assert whole.is_closed

    for pieces in ([bytes([byte]) for byte in stream], cut(stream, random.Random(seed))):
        for answers_late in (False, True):
            other = drive(pieces, answers_late=answers_late)
            assert other.asked == whole.asked
            assert other.told == whole.told
            assert other.is_closed == whole.is_closed


def cut(stream: bytes, chance: random.Random) -> list[bytes]:
    """The same bytes in pieces."""
    pieces = []
    while stream:
        size = chance.choice((1, 2, 7, 40, 400))
        pieces.append(stream[:size])
        stream = stream[size:]
    return pieces


PACKED = gzip.compress(b"hi" * 100, mtime=0)
SEEDS: Sequence[bytes] = (
    b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /p HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /p HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\n",
    b"HEAD /nope HTTP/1.1\r\n\r\n",
    b"POST /p HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok",
    b"POST /p HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s"
    % (len(PACKED), PACKED),
    b"GET http://h/x?y#z HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    b"\r\n",
    b"\r",
    b"\n",
    b"\0",
    b" ",
    b":",
    b"Content-Length: 1\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"0\r\n\r\n",
    b"x" * 301,
)


def mutate(chance: random.Random) -> bytes:
    """A stream made of the seeds, now and then broken."""
    stream = bytearray(b"".join(chance.choices(SEEDS, k=chance.randint(1, 5))))
    for _ in range(chance.choice((0, 0, 1, 2, 5))):
        at = chance.randrange(len(stream))
        match chance.randrange(4):
            case 0:
                stream[at] = chance.randrange(256)
            case 1:
                del stream[at : at + chance.randint(1, 9)]
            case 2:
                stream[at:at] = chance.choice(SEEDS)
            case _:
                stream[at:at] = stream[at : at + chance.randint(1, 30)]
        stream = stream or bytearray(b"\n")
    return bytes([chance.randrange(256)]) + bytes(stream)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(1 << 32)
    chance, tried, end = random.Random(seed), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutate(chance)
        try:
            one_input(data)
        except Exception:
            print(f"seed {seed}, input {tried}: {data!r}")
            raise
        tried += 1
    print(f"{tried} inputs, seed {seed}")


if __name__ == "__main__":
    main()
