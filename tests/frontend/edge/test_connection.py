"""A connection by hand: no socket, and the clock is what the test says."""

from __future__ import annotations

import asyncio
from time import monotonic
from types import ModuleType

import pytest

from mmserve.config.settings import Settings
from mmserve.frontend.edge import (
    LINGER_ALL_S,
    LINGER_BYTES,
    LINGER_S,
    PILE_BYTES,
    TURN,
    Connection,
    Edge,
    Limits,
    cors_of,
    limits_of,
)
from mmserve.frontend.http import Exchange, Response

GET = b"GET / HTTP/1.1\r\n\r\n"
LIMITS = Limits(idle_s=10, header_s=20, body_s=30, write_s=40)


class Bench:
    """A connection between a memory transport and an application that waits for the test."""

    def __init__(self, fuzz: ModuleType, limits: Limits = LIMITS) -> None:
        self.waiting: list[Exchange] = []
        self.edge = Edge(self.waiting.append, limits)
        self.transport = fuzz.MemoryTransport()
        self.connection = Connection(self.edge, "0.0.0.0")
        self.connection.connection_made(self.transport)

    def feed(self, data: bytes) -> None:
        self.connection.data_received(data)

    def answer(self, status: int = 200) -> None:
        self.waiting.pop(0).reply(Response(status))

    def after(self, seconds: float) -> None:
        """The sweep comes when so much time has passed."""
        self.edge.sweep(monotonic() + seconds)

    @property
    def statuses(self) -> list[bytes]:
        return [part[:3] for part in bytes(self.transport.written).split(b"HTTP/1.1 ")[1:]]


@pytest.fixture
def bench(fuzz: ModuleType) -> Bench:
    return Bench(fuzz)


def test_reading_pauses_while_much_is_piled_up(bench: Bench) -> None:
    bench.feed(GET)
    bench.feed(GET * (PILE_BYTES // len(GET)))
    assert not bench.transport.is_paused
    bench.feed(GET * 2)
    assert bench.transport.is_paused
    bench.answer()
    assert not bench.transport.is_paused or len(bench.waiting) == 1
    while bench.waiting:
        bench.answer()
    assert not bench.transport.is_paused
    assert bench.statuses == [b"200"] * (PILE_BYTES // len(GET) + 3)


def test_an_error_reads_on_what_was_held_back(bench: Bench) -> None:
    bench.feed(GET + bytes(PILE_BYTES + 1))
    assert bench.transport.is_paused
    bench.answer(404)
    assert not bench.transport.is_paused
    assert bench.transport.has_ended
    assert not bench.transport.is_closed


def test_an_idle_connection_is_closed_after_its_time(bench: Bench) -> None:
    bench.feed(GET)
    bench.answer()
    bench.after(9)
    assert not bench.transport.is_closed
    bench.after(10)
    assert (bench.transport.is_closed, bench.transport.is_cut) == (True, False)


def test_a_connection_outlasts_the_minute_that_balancers_keep_it(fuzz: ModuleType) -> None:
    """They reuse it for so long: whoever closes first loses a request now and then."""
    bench = Bench(fuzz, limits_of(Settings()))
    bench.feed(GET)
    bench.answer()
    bench.after(65)
    bench.feed(GET)
    bench.answer()
    assert bench.statuses == [b"200"] * 2
    assert not bench.transport.is_closed
    bench.after(120)
    assert bench.transport.is_closed


def test_an_idle_client_that_did_not_read_its_reply_is_cut(bench: Bench) -> None:
    bench.feed(GET)
    bench.answer()
    bench.transport.unsent = 100
    bench.after(10)
    assert bench.transport.is_cut


def test_an_empty_line_is_no_request(bench: Bench) -> None:
    for byte in b"\r\n\r\n":
        bench.feed(bytes([byte]))
    bench.after(10)
    assert bench.transport.is_closed
    assert bench.statuses == []


def test_the_time_for_a_head_runs_from_its_first_byte(bench: Bench) -> None:
    bench.feed(b"GET / HT")
    bench.after(19)
    bench.feed(b"TP/1.1\r\nA: ")
    bench.after(20)
    assert bench.statuses == [b"408"]


def test_a_body_may_come_slowly(bench: Bench) -> None:
    bench.feed(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n")
    bench.after(29)
    bench.feed(b"a")
    bench.after(29)
    assert bench.statuses == []
    bench.after(30)
    assert bench.statuses == [b"408"]


def test_the_application_has_all_the_time_there_is(bench: Bench) -> None:
    bench.feed(GET)
    bench.after(1e9)
    assert not bench.transport.is_closed


def test_a_slow_reader_is_cut_only_when_it_takes_nothing(bench: Bench) -> None:
    bench.feed(GET + GET)
    bench.connection.pause_writing()
    bench.transport.unsent = 5
    bench.answer()
    assert not bench.waiting  # the second request waits until the first reply is taken
    for seconds, unsent in ((39, 4), (78, 3), (117, 2)):
        bench.transport.unsent = unsent
        bench.after(seconds)
    bench.after(150)
    assert not bench.transport.is_closed
    bench.after(160)
    assert bench.transport.is_cut


def test_a_reader_that_caught_up_is_served_again(bench: Bench) -> None:
    bench.feed(GET + GET)
    bench.connection.pause_writing()
    bench.answer()
    bench.connection.resume_writing()
    bench.answer()
    assert bench.statuses == [b"200", b"200"]


@pytest.mark.parametrize("enough", ["time", "silence", "bytes"])
def test_lingering_has_an_end(bench: Bench, enough: str) -> None:
    bench.feed(b"rubbish\r\n\r\n")
    assert bench.statuses == [b"400"]
    assert not bench.transport.is_closed
    match enough:
        case "time":
            bench.connection._since += LINGER_ALL_S  # bytes come all the time
            bench.after(LINGER_ALL_S)
        case "silence":
            bench.after(LINGER_S)
        case "bytes":
            for _ in range(LINGER_BYTES >> 20):
                bench.feed(bytes(1 << 20))
            assert not bench.transport.is_closed
            bench.feed(b"x")
    assert bench.transport.is_closed


def test_nothing_is_written_once_a_reply_met_a_reset(bench: Bench) -> None:
    def reply(exchange: Exchange) -> None:
        exchange.reply(Response(200))
        bench.transport.close()

    bench.edge.application = reply
    bench.feed(GET * 10)
    assert bench.statuses == [b"200"]


def test_a_drain_answers_what_it_finds_in_the_pile(bench: Bench) -> None:
    async def drain() -> None:
        bench.edge.application = lambda exchange: exchange.reply(Response(200))
        bench.feed(GET * (TURN + 5))  # more than is answered in a row
        bench.edge.drain()
        assert not bench.transport.is_closed
        await asyncio.sleep(0)

    asyncio.run(drain())
    assert bench.statuses == [b"200"] * TURN + [b"503"]


def test_a_drain_shortens_the_patience_with_lingerers(bench: Bench) -> None:
    bench.feed(b"rubbish\r\n\r\n")
    bench.edge.drain()
    assert not bench.transport.is_closed
    bench.after(LINGER_S / 2)
    assert bench.transport.is_closed


def test_cors_settings_become_headers() -> None:
    assert cors_of(Settings()) == ()
    some = Settings(cors_allowed_origin="*", cors_allowed_headers="")
    assert cors_of(some) == (("access-control-allow-origin", "*"),)
