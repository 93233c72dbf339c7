"""The event loop stays awake for a moment, and no longer."""

from __future__ import annotations

import asyncio
import socket
from time import monotonic

from mmserve.scheduling.busy_poll import BusyPoll
from mmserve.wire.polling import MOST_CREDIT

QUICK_S = 1e-5


async def asleep(poll: BusyPoll) -> None:
    """Turns the loop until it is not asked for more turns."""
    for _ in range(10_000_000):
        if not poll.is_awake:
            return
        await asyncio.sleep(0)
    raise AssertionError("it never sleeps")


def test_it_ends_by_itself() -> None:
    async def check() -> None:
        poll = BusyPoll(0.002)
        poll.sent(QUICK_S, monotonic())
        assert poll.is_awake
        await asleep(poll)

    asyncio.run(check())


def test_slow_work_is_slept_through() -> None:
    async def check() -> bool:
        poll = BusyPoll(0.0001)
        poll.sent(0.02, monotonic())
        poll.answered(0.02, monotonic())
        return poll.is_awake

    assert not asyncio.run(check())


def test_zero_never_stays_awake() -> None:
    async def check() -> bool:
        poll = BusyPoll(0.0)
        poll.sent(0.0, monotonic())
        return poll.is_awake

    assert not asyncio.run(check())


def test_what_arrives_meanwhile_is_heard() -> None:
    async def check() -> bytes:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        with theirs:
            BusyPoll(60.0).sent(QUICK_S, monotonic())  # longer than any test
            theirs.sendall(b"here")
            heard = await reader.readexactly(4)
        writer.close()
        return heard

    assert asyncio.run(check()) == b"here"


def test_a_client_that_never_asks_again_is_given_up_and_workers_are_not() -> None:
    async def check() -> tuple[bool, bool]:
        poll = BusyPoll(0.0005)
        # Each time the worker answers at once, and the client does not come back.
        for _ in range(MOST_CREDIT + 1):
            poll.sent(QUICK_S, monotonic())
            poll.answered(QUICK_S, monotonic())
            await asleep(poll)
        poll.sent(QUICK_S, monotonic())
        for_worker = poll.is_awake
        poll.answered(QUICK_S, monotonic())
        await asyncio.sleep(0)  # the turn in which it notices
        return for_worker, poll.is_awake

    assert asyncio.run(check()) == (True, False)
