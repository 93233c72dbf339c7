"""The plan of a run and the counting of what comes of it. No clock: instants come in.

Instants are nanoseconds of the monotonic clock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from hdrh.histogram import HdrHistogram

from mmserve_loadtest.arrivals import ARRIVALS
from mmserve_loadtest.http import parse_url
from mmserve_loadtest.latency import Latency, histogram, percentile_ms, summary

NS = 1_000_000_000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        url: `http://HOST:PORT/PATH`.
        connections: open at a time, in all processes together.
        duration_s: what is measured; the warm-up comes before it.
        rate: requests per second of an open loop; None for a closed loop, where each connection
            sends its next request when it has the reply to the last.
        arrivals: of an open loop, one of `arrivals.ARRIVALS`.
        timeout_s: after which a request is given up and its connection closed.

    Raises:
        ValueError: the plan makes no sense.
    """

    url: str
    method: str = "POST"
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    connections: int = 1
    duration_s: float = 10.0
    warmup_s: float = 1.0
    rate: float | None = None
    arrivals: str = "constant"
    timeout_s: float = 30.0
    processes: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        parse_url(self.url)
        if self.processes < 1 or self.connections < self.processes:
            raise ValueError("there must be at least one connection per process")
        if self.duration_s <= 0 or self.timeout_s <= 0 or self.warmup_s < 0:
            raise ValueError("duration and timeout must be above zero, the warm-up not below")
        if self.rate is not None and self.rate <= 0:
            raise ValueError("the rate of an open loop must be above zero")
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"arrivals are one of {', '.join(ARRIVALS)}, not {self.arrivals!r}")

    @property
    def loop(self) -> Literal["closed", "open"]:
        return "closed" if self.rate is None else "open"


def shares(plan: Plan) -> Iterator[Plan]:
    """The plan of each process: connections and rate are shared out."""
    for number in range(plan.processes):
        more = number < plan.connections % plan.processes
        yield msgspec.structs.replace(
            plan,
            connections=plan.connections // plan.processes + more,
            rate=None if plan.rate is None else plan.rate / plan.processes,
            processes=1,
            seed=plan.seed + number,
        )


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run. Everything counts requests that were due after the warm-up.

    Attributes:
        rate_per_s: replies with a status below 400 that came within the measured time.
        latency_ms: of all replies with a status below 400; in an open loop from the moment the
            request was due, whether or not a connection was free.
        statuses: replies by status.
        timeouts: requests given up.
        connection_errors: connections refused, reset, or ended inside an exchange.
        late_p99_ms: open loop: how late the generator itself was, where a connection was free.
        generator_cpu: CPU seconds of the generator per second; near 1 per process, the generator
            is what limits the rate.
        longest_pause_ms: for which the generator did not run at all; the machine stood still, or
            others had it.
        histogram: of the latencies in nanoseconds, HdrHistogram's own encoding.
    """

    rate_per_s: float
    latency_ms: Latency
    statuses: dict[int, int]
    timeouts: int
    connection_errors: int
    late_p99_ms: float
    generator_cpu: float
    longest_pause_ms: float
    histogram: str

    @property
    def failures(self) -> int:
        """Requests without a reply below 400."""
        refused = sum(count for status, count in self.statuses.items() if status >= 400)
        return refused + self.timeouts + self.connection_errors


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of the processes of one run."""
    recorded = histogram([])
    statuses = Counter[int]()
    for outcome in outcomes:
        recorded.add(HdrHistogram.decode(outcome.histogram))
        statuses.update(outcome.statuses)
    return Outcome(
        rate_per_s=sum(outcome.rate_per_s for outcome in outcomes),
        latency_ms=summary(recorded),
        statuses=dict(statuses),
        timeouts=sum(outcome.timeouts for outcome in outcomes),
        connection_errors=sum(outcome.connection_errors for outcome in outcomes),
        late_p99_ms=max(outcome.late_p99_ms for outcome in outcomes),
        generator_cpu=sum(outcome.generator_cpu for outcome in outcomes),
        longest_pause_ms=max(outcome.longest_pause_ms for outcome in outcomes),
        histogram=recorded.encode().decode(),
    )


class Tally:
    """Counts what happens in one process of a run.

    Attributes:
        starts_ns, begins_ns, ends_ns: of the warm-up, of what is measured, of both.
        replies: all of them, also those of the warm-up.
        longest_pause_ns: see `Outcome`.
    """

    def __init__(self, plan: Plan, starts_ns: int) -> None:
        self.starts_ns = starts_ns
        self.begins_ns = starts_ns + int(plan.warmup_s * NS)
        self.ends_ns = self.begins_ns + int(plan.duration_s * NS)
        self.replies = self.longest_pause_ns = 0
        self._latencies_ns, self._lateness_ns = array("q"), array("q")
        self._in_time = self._timeouts = self._connection_errors = 0
        self._statuses = Counter[int]()

    def end(self, now_ns: int) -> None:
        """The run ends now, before its time."""
        self.ends_ns = min(self.ends_ns, max(now_ns, self.begins_ns + 1))

    def sent(self, due_ns: int, now_ns: int) -> None:
        """A request of an open loop found a free connection."""
        if due_ns >= self.begins_ns:
            self._lateness_ns.append(now_ns - due_ns)

    def answered(self, status: int, due_ns: int, now_ns: int) -> None:
        self.replies += 1
        if status < 400 and self.begins_ns <= now_ns < self.ends_ns:
            self._in_time += 1
        if due_ns >= self.begins_ns:
            self._statuses[status] += 1
            if status < 400:
                self._latencies_ns.append(now_ns - due_ns)

    def timed_out(self, due_ns: int) -> None:
        self._timeouts += due_ns >= self.begins_ns

    def failed(self, due_ns: int) -> None:
        self._connection_errors += due_ns >= self.begins_ns

    def outcome(self, generator_cpu: float) -> Outcome:
        recorded = histogram(self._latencies_ns)
        return Outcome(
            rate_per_s=round(self._in_time * NS / (self.ends_ns - self.begins_ns), 2),
            latency_ms=summary(recorded),
            statuses=dict(self._statuses),
            timeouts=self._timeouts,
            connection_errors=self._connection_errors,
            late_p99_ms=percentile_ms(self._lateness_ns, 99.0),
            generator_cpu=round(generator_cpu, 3),
            longest_pause_ms=round(self.longest_pause_ns / 1e6, 1),
            histogram=recorded.encode().decode(),
        )
