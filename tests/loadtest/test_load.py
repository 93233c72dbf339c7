"""The generator against a real server."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from mmserve_loadtest.client import Connection, NoReply, call
from mmserve_loadtest.load import generate, generate_while, run
from mmserve_loadtest.tally import NS, Plan

Make = Callable[[], Any]


def plan(base: str, path: str, **more: Any) -> Plan:
    return Plan(url=base + path, **({"warmup_s": 0.0, "duration_s": 0.3, "body": b"x"} | more))


@pytest.mark.parametrize("connections", [1, 7])
def test_a_closed_loop_counts_what_the_server_saw(tiny_server: Make, connections: int) -> None:
    async def scenario() -> None:
        server = tiny_server()
        async with server.listening() as base:
            outcome = await generate(plan(base, "/ok", connections=connections))
        assert outcome.statuses == {200: server.seen["/ok"]}
        assert server.connections == connections
        assert outcome.failures == 0
        assert outcome.rate_per_s > 0
        assert outcome.latency_ms.p50 <= outcome.latency_ms.p99 <= outcome.latency_ms.max

    asyncio.run(scenario())


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_an_open_loop_sends_what_is_due_and_no_more(tiny_server: Make, arrivals: str) -> None:
    async def scenario() -> None:
        server = tiny_server()
        async with server.listening() as base:
            outcome = await generate(
                plan(base, "/ok", connections=4, rate=200, arrivals=arrivals, duration_s=0.5)
            )
        assert outcome.statuses == {200: server.seen["/ok"]}
        assert arrivals == "poisson" or server.seen["/ok"] == 100
        assert outcome.failures == 0

    asyncio.run(scenario())


def test_latency_in_an_open_loop_counts_from_when_the_request_was_due(tiny_server: Make) -> None:
    async def scenario() -> None:
        server = tiny_server()

        def progress(elapsed_s: float, replies: int | None) -> None:
            if elapsed_s > 0.5:  # all 40 were due before that, on one connection
                server.release()

        async with server.listening() as base:
            held = plan(base, "/held", rate=100, duration_s=0.4)
            outcome = await generate(held, progress=progress)
        assert outcome.statuses == {200: 40}
        # The server answered each at once when its turn came; the last was due at 0.39 s.
        assert outcome.latency_ms.p50 > 300
        assert outcome.latency_ms.max > 490
        assert server.connections == 1

    asyncio.run(scenario())


def test_a_closed_loop_cannot_see_a_stall_of_that_kind(tiny_server: Make) -> None:
    async def scenario() -> None:
        server = tiny_server()
        asyncio.get_running_loop().call_later(0.5, server.release)
        async with server.listening() as base:
            outcome = await generate(plan(base, "/held", duration_s=0.7))
        assert outcome.latency_ms.max > 400
        assert outcome.latency_ms.p50 < outcome.latency_ms.max / 2

    asyncio.run(scenario())


def test_refused_requests_are_counted_apart_and_the_connection_is_made_again(
    tiny_server: Make,
) -> None:
    async def scenario() -> None:
        server = tiny_server()
        async with server.listening() as base:
            outcome = await generate(plan(base, "/refuse", connections=2))
        assert outcome.statuses == {503: server.seen["/refuse"]}
        assert server.connections >= server.seen["/refuse"] > 2
        assert (outcome.rate_per_s, outcome.latency_ms.max) == (0, 0)
        assert outcome.failures == server.seen["/refuse"]
        assert outcome.connection_errors == 0

    asyncio.run(scenario())


def test_cut_connections_are_connection_errors(tiny_server: Make) -> None:
    async def scenario() -> None:
        server = tiny_server()
        async with server.listening() as base:
            outcome = await generate(plan(base, "/cut", connections=2))
        assert outcome.statuses == {}
        assert outcome.connection_errors == server.seen["/cut"] > 2

    asyncio.run(scenario())


@pytest.mark.parametrize("rate", [None, 50.0])
def test_requests_without_an_answer_are_timeouts(tiny_server: Make, rate: float | None) -> None:
    async def scenario() -> None:
        server = tiny_server()
        async with server.listening() as base:
            outcome = await generate(plan(base, "/never", connections=3, timeout_s=0.15, rate=rate))
        assert outcome.statuses == {}
        assert outcome.timeouts >= 3
        assert rate is None or outcome.timeouts == 15  # sent or not, every one was due
        assert outcome.connection_errors == 0

    asyncio.run(scenario())


def test_a_server_that_is_not_there_is_a_connection_error() -> None:
    outcome = run(plan("http://127.0.0.1:1", "/ok", duration_s=2.0))
    assert outcome.statuses == {}
    assert outcome.connection_errors >= 1


def test_the_warm_up_is_sent_but_not_counted(tiny_server: Make) -> None:
    async def scenario() -> None:
        server = tiny_server()
        async with server.listening() as base:
            outcome = await generate(plan(base, "/ok", rate=100, warmup_s=0.3, duration_s=0.2))
        assert server.seen["/ok"] == 50
        assert sum(outcome.statuses.values()) == 20

    asyncio.run(scenario())


def test_sending_ends_with_the_work_it_goes_beside(tiny_server: Make) -> None:
    async def scenario() -> None:
        server = tiny_server()

        async def work() -> str:
            await server.saw(5)
            return "done"

        async with server.listening() as base:
            endless = plan(base, "/ok", rate=100, duration_s=3600)
            outcome, result = await generate_while(endless, work())
        assert result == "done"
        assert outcome.statuses == {200: server.seen["/ok"]}

    asyncio.run(scenario())


def test_what_fails_beside_the_sending_is_raised(tiny_server: Make) -> None:
    async def scenario() -> None:
        async def work() -> None:
            raise RuntimeError("broken")

        async with tiny_server().listening() as base:
            with pytest.raises(RuntimeError, match="broken"):
                await generate_while(plan(base, "/ok", duration_s=3600), work())

    asyncio.run(scenario())


def test_processes_share_the_work(tiny_server: Make) -> None:
    async def scenario() -> None:
        server, told = tiny_server(), list[float]()
        async with server.listening() as base:
            shared = plan(base, "/ok", connections=3, processes=2, rate=100)
            outcome = await asyncio.to_thread(run, shared, lambda at_s, _: told.append(at_s))
        assert outcome.statuses == {200: server.seen["/ok"]}
        assert server.seen["/ok"] == 30
        assert server.connections == 3
        assert told

    asyncio.run(scenario())


def test_a_start_in_the_future_is_waited_for(tiny_server: Make) -> None:
    async def scenario() -> None:
        server, starts_ns = tiny_server(), time.monotonic_ns() + NS // 4
        async with server.listening() as base:
            sending = asyncio.create_task(generate(plan(base, "/ok"), starts_ns))
            await server.saw(1)
            assert time.monotonic_ns() >= starts_ns
            await sending

    asyncio.run(scenario())


def test_single_calls(tiny_server: Make) -> None:
    async def scenario() -> None:
        async with tiny_server().listening() as base:
            reply = await asyncio.to_thread(call, "POST", f"{base}/ok", b"x")
            assert (reply.status, reply.body) == (200, b"ok")
            assert (await asyncio.to_thread(call, "GET", f"{base}/refuse")).closes
            with pytest.raises(NoReply, match="without a reply"):
                await asyncio.to_thread(call, "GET", f"{base}/cut")
            with pytest.raises(NoReply, match="in time"):
                await asyncio.to_thread(lambda: call("GET", f"{base}/never", timeout_s=0.1))

            def closed(request: bytes) -> bool:
                port = int(base.rpartition(":")[2])
                with Connection(("127.0.0.1", port), timeout_s=5) as connection:
                    connection.send(request)
                    connection.reply()
                    return connection.is_closed_within(0.2)

            assert await asyncio.to_thread(closed, b"GET /refuse HTTP/1.1\r\n\r\n")
            assert not await asyncio.to_thread(closed, b"GET /ok HTTP/1.1\r\n\r\n")

    asyncio.run(scenario())


def test_a_generator_that_was_kept_from_running_says_so(tiny_server: Make) -> None:
    async def scenario() -> None:
        server = tiny_server()

        async def work() -> None:
            await server.saw(1)
            time.sleep(0.4)  # noqa: ASYNC251 - holds the loop, as a machine that stands still

        async with server.listening() as base:
            outcome, _ = await generate_while(plan(base, "/ok", duration_s=3600), work())
        assert outcome.longest_pause_ms > 300

    asyncio.run(scenario())
