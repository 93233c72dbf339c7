"""The load generator: closed and open loop over keep-alive connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any, Protocol, TypeVar, cast

from mmserve_loadtest.alarm import Alarm
from mmserve_loadtest.arrivals import schedule
from mmserve_loadtest.http import BadReply, ReplyReader, parse_url, request_bytes
from mmserve_loadtest.tally import NS, Outcome, Plan, Tally, merge, shares

try:
    import uvloop
except ImportError:  # not needed, only faster
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    LOOP = "asyncio"
else:
    new_event_loop, LOOP = uvloop.new_event_loop, f"uvloop {version('uvloop')}"

SWEEP_S = 0.05
TELL_S = 0.5
RECONNECT_PAUSE_S = 0.05
PROCESS_START_S = 1.5  # for the processes of one run to import and connect, before the common start

T = TypeVar("T")

#: Told about twice a second the seconds since the start and, where known, the replies so far.
Progress = Callable[[float, int | None], None]


def run(plan: Plan, progress: Progress | None = None) -> Outcome:
    """Carries the plan out. Errors of the server are counted, never raised."""
    if plan.processes > 1:
        return _run_in_processes(plan, progress)
    return _run_here(plan, time.monotonic_ns(), progress)


def _run_in_processes(plan: Plan, progress: Progress | None) -> Outcome:
    starts_ns = time.monotonic_ns() + int(PROCESS_START_S * NS)
    with ProcessPoolExecutor(plan.processes, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(_run_here, part, starts_ns) for part in shares(plan)]
        while progress is not None and not all(part.done() for part in parts):
            time.sleep(TELL_S)
            progress((time.monotonic_ns() - starts_ns) / NS, None)
        return merge([part.result() for part in parts])


def _run_here(plan: Plan, starts_ns: int, progress: Progress | None = None) -> Outcome:
    # The collector's pauses would be taken for the server's.
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(generate(plan, starts_ns, progress))
    finally:
        gc.enable()


async def generate_while(plan: Plan, work: Awaitable[T]) -> tuple[Outcome, T]:
    """Sends as planned for as long as something else takes, the plan's duration at most.

    Returns:
        What came of the requests that were due in that time, and of the work.
    """
    working = asyncio.ensure_future(work)
    sending = asyncio.create_task(generate(plan, until=working))
    try:
        result = await working
    finally:
        outcome = await sending
    return outcome, result


async def generate(
    plan: Plan,
    starts_ns: int | None = None,
    progress: Progress | None = None,
    until: asyncio.Future[Any] | None = None,
) -> Outcome:
    """`run` in this process, for callers that have an event loop already.

    Args:
        starts_ns: of the monotonic clock; None for now.
        until: ends the sending early when it is done.
    """
    begun_ns, cpu_s = time.monotonic_ns(), time.process_time()
    tally = Tally(plan, begun_ns if starts_ns is None else starts_ns)
    async with asyncio.TaskGroup() as tasks:
        crew = _Crew(plan, tally, tasks)
        if until is not None:
            until.add_done_callback(lambda _: crew.stop())
        try:
            await crew.work(progress)
        finally:
            await crew.close()
    cpu_s = time.process_time() - cpu_s
    return tally.outcome(cpu_s / ((time.monotonic_ns() - begun_ns) / NS))


class _Pace(Protocol):
    """Decides which connection sends when."""

    def ready(self, line: _Line) -> None:
        """A connection may send."""

    def lost(self, line: _Line) -> None:
        """A connection may not send any more."""

    def give_up(self, before_ns: int) -> None:
        """Requests that were due before this instant and are not sent will not be."""

    def is_over(self, now_ns: int) -> bool:
        """Nothing more will be sent."""

    def close(self) -> None:
        """Nothing new is due from now on."""


class _Closed:
    """Each connection sends its next request when it has the reply to the last."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def ready(self, line: _Line) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._tally.ends_ns:
            line.send(now_ns)

    def lost(self, line: _Line) -> None:
        pass

    def give_up(self, before_ns: int) -> None:
        pass

    def is_over(self, now_ns: int) -> bool:
        return now_ns >= self._tally.ends_ns

    def close(self) -> None:
        pass


class _Open:
    """Requests are due by the clock. One that finds no free connection waits for one, and its
    latency counts from when it was due."""

    def __init__(self, plan: Plan, tally: Tally) -> None:
        assert plan.rate is not None
        total_s = plan.warmup_s + plan.duration_s
        self._tally = tally
        self._arrivals = schedule(plan.arrivals, plan.rate, total_s, plan.seed)
        self._backlog, self._free = deque[int](), deque[_Line]()
        self._alarm = Alarm(self._send_what_is_due)
        self._next_ns = self._advance()

    def ready(self, line: _Line) -> None:
        if self._backlog:
            line.send(self._backlog.popleft())
        else:
            self._free.append(line)

    def lost(self, line: _Line) -> None:
        with contextlib.suppress(ValueError):
            self._free.remove(line)

    def give_up(self, before_ns: int) -> None:
        while self._backlog and self._backlog[0] < before_ns:
            self._tally.timed_out(self._backlog.popleft())

    def is_over(self, now_ns: int) -> bool:
        return self._next_ns is None and not self._backlog

    def close(self) -> None:
        self._alarm.close()
        self._next_ns = None

    def _advance(self) -> int | None:
        """When the next request is due; the alarm is set for it."""
        at_s = next(self._arrivals, None)
        if at_s is None:
            return None
        due_ns = self._tally.starts_ns + int(at_s * NS)
        self._alarm.set(due_ns)
        return due_ns

    def _send_what_is_due(self) -> None:
        now_ns = time.monotonic_ns()
        while self._next_ns is not None and self._next_ns <= now_ns:
            if self._free:
                self._free.popleft().send(self._next_ns)
                now_ns = time.monotonic_ns()
                self._tally.sent(self._next_ns, now_ns)
            else:
                self._backlog.append(self._next_ns)
            self._next_ns = self._advance()


class _Line(asyncio.Protocol):
    """One connection at a time, with one request at a time on it.

    Attributes:
        due_ns: when the request that waits for its reply was due; 0 while none does.
        closed: set while there is no connection.
    """

    def __init__(self, crew: _Crew) -> None:
        self._crew, self._tally, self._pace = crew, crew.tally, crew.pace
        self._request, self._bodiless = crew.request, crew.plan.method == "HEAD"
        self._reader = ReplyReader(bodiless=self._bodiless)
        self._transport: asyncio.Transport | None = None
        self.due_ns = 0
        self.closed = asyncio.Event()
        self.closed.set()

    def send(self, due_ns: int) -> None:
        assert self._transport is not None
        self.due_ns = due_ns
        self._transport.write(self._request)

    def hang_up(self) -> None:
        """Closes the connection and forgets the request on it."""
        self.due_ns = 0
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports do not inherit from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.closed.clear()
        self._reader = ReplyReader(bodiless=self._bodiless)

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        try:
            replies = self._reader.feed(data)
        except BadReply:
            self._fail()
            return
        if not replies:
            return
        if not self.due_ns or len(replies) > 1:  # it answers what was not asked
            self._fail()
            return
        due_ns, self.due_ns = self.due_ns, 0
        if not replies[0].closes:
            self._pace.ready(self)  # the next request first: the server need not wait for counts
        elif self._transport is not None:
            self._transport.close()
        self._tally.answered(replies[0].status, due_ns, now_ns)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.due_ns:
            reply = None
            with contextlib.suppress(BadReply):
                reply = self._reader.finish()
            if reply is not None:
                self._tally.answered(reply.status, self.due_ns, time.monotonic_ns())
            else:
                self._tally.failed(self.due_ns)
            self.due_ns = 0
        self._transport = None
        self.closed.set()
        self._crew.lost(self)

    def _fail(self) -> None:
        self._tally.failed(self.due_ns or time.monotonic_ns())
        self.hang_up()


class _Crew:
    """All connections of one process."""

    def __init__(self, plan: Plan, tally: Tally, tasks: asyncio.TaskGroup) -> None:
        self.plan, self.tally, self._tasks = plan, tally, tasks
        self.target = parse_url(plan.url)
        self.request = request_bytes(plan.method, self.target, plan.body, plan.headers)
        self.pace: _Pace = _Closed(tally) if plan.rate is None else _Open(plan, tally)
        self._lines = [_Line(self) for _ in range(plan.connections)]
        self._opening = set[asyncio.Task[None]]()
        self._is_closing = False

    async def work(self, progress: Progress | None) -> None:
        """Returns when every request has its reply or was given up."""
        timeout_ns = int(self.plan.timeout_s * NS)
        for line in self._lines:
            self._open_soon(line)
        told_ns, looked_ns = 0, time.monotonic_ns()
        while True:
            now_ns = time.monotonic_ns()
            pause_ns = now_ns - looked_ns - int(SWEEP_S * NS)
            self.tally.longest_pause_ns = max(self.tally.longest_pause_ns, pause_ns)
            looked_ns = now_ns
            self.pace.give_up(now_ns - timeout_ns)
            for line in self._lines:
                if line.due_ns and line.due_ns < now_ns - timeout_ns:
                    self.tally.timed_out(line.due_ns)
                    line.hang_up()
            if progress is not None and now_ns - told_ns > TELL_S * NS:
                told_ns = now_ns
                progress((now_ns - self.tally.starts_ns) / NS, self.tally.replies)
            if self.pace.is_over(now_ns) and not any(line.due_ns for line in self._lines):
                return
            await asyncio.sleep(SWEEP_S)

    def lost(self, line: _Line) -> None:
        """The connection ended."""
        self.pace.lost(line)
        if not self._is_closing and not self.pace.is_over(time.monotonic_ns()):
            self._open_soon(line)

    def stop(self) -> None:
        """Ends the sending before its time."""
        self.tally.end(time.monotonic_ns())
        self.pace.close()

    async def close(self) -> None:
        """Returns when no connection is left."""
        self.pace.close()
        self._is_closing = True
        for opening in self._opening:
            opening.cancel()
        for line in self._lines:
            line.hang_up()
        await asyncio.gather(*(line.closed.wait() for line in self._lines))

    def _open_soon(self, line: _Line) -> None:
        opening = self._tasks.create_task(self._open(line))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, line: _Line) -> None:
        """Connects, again and again until the run is over, and lets the connection send."""
        await asyncio.sleep((self.tally.starts_ns - time.monotonic_ns()) / NS - SWEEP_S)
        while not await self._connect(line):
            if self.plan.rate is None:  # an open loop's requests time out while they wait
                self.tally.failed(time.monotonic_ns())
            if self.pace.is_over(time.monotonic_ns()):
                return
            await asyncio.sleep(RECONNECT_PAUSE_S)
        await asyncio.sleep((self.tally.starts_ns - time.monotonic_ns()) / NS)
        if not line.closed.is_set():  # else it was lost meanwhile, and `lost` opens it again
            self.pace.ready(line)

    async def _connect(self, line: _Line) -> bool:
        loop, target = asyncio.get_running_loop(), self.target
        try:
            async with asyncio.timeout(self.plan.timeout_s):
                if target.port:
                    await loop.create_connection(lambda: line, target.host, target.port)
                else:
                    await loop.create_unix_connection(lambda: line, target.host)
        except OSError:  # TimeoutError is one
            return False
        return True
