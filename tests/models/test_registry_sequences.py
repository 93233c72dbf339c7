"""Whatever order things happen in: every request gets one outcome, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmserve import platform
from mmserve.errors import ServeError
from tests.models.hall import PREDICT, Hall, open_hall

NAMES = ("a", "b")
#: What the models of the sequences do while they load.
LOADS = {
    "quick": "pass",
    "slow": "time.sleep(0.03)",
    "refuses": "raise ValueError('no')",
    "dies": "os.kill(os.getpid(), signal.SIGKILL)",
    "fickle": "import random\nif random.SystemRandom().random() < 0.4: raise ValueError('no')",
}
LIMIT_S = 20.0

name = st.sampled_from(NAMES)
workers = st.integers(0, 3)
step = st.one_of(
    st.tuples(
        st.just("register"),
        name,
        st.sampled_from(sorted(LOADS)),
        workers,
        st.booleans(),
        st.booleans(),
        st.sampled_from([(1, None), (3, None), (3, 5)]),
    ),
    st.tuples(st.just("scale"), name, workers, workers, st.booleans()),
    st.tuples(st.just("unregister"), name),
    st.tuples(
        st.just("ask"),
        name,
        st.sampled_from(["", "", "sleep 0.004", "sleep 0.05", "raise it", "crash"]),
        st.integers(1, 12),
    ),
    st.tuples(st.just("leave"), name),
    st.tuples(st.just("kill"), st.integers(0, 5)),
    st.tuples(st.just("kill zygote")),
    st.tuples(st.just("wait"), st.sampled_from([0, 0.001, 0.01, 0.04])),
)


class Sequence:
    """One random sequence, played on a hall that outlives it."""

    def __init__(self, hall: Hall) -> None:
        self.hall = hall
        self.calls: list[asyncio.Task[Any]] = []
        self.outcomes: list[asyncio.Future[Any]] = []

    async def play(self, steps: list[tuple[Any, ...]]) -> None:
        for kind, *arguments in steps:
            act = getattr(self, kind.replace(" ", "_"))
            made = act(*arguments)
            if made is not None:
                await made
        for name in NAMES:
            self.is_consistent(name)
        async with asyncio.timeout(LIMIT_S):
            if self.calls:
                await asyncio.wait(self.calls)
            for name in NAMES:
                self.is_consistent(name)
            for name, _ in self.hall.registry.names():
                with contextlib.suppress(ServeError):
                    await self.hall.registry.unregister(name)
            await asyncio.gather(*self.outcomes)
        await self.hall.is_empty(at_once=not any(kind.startswith("kill") for kind, *_ in steps))

    def is_consistent(self, name: str) -> None:
        registry = self.hall.registry
        if not registry.has(name):
            return
        described, slots = registry.describe(name), self.hall.slots(name)
        low, high = described.minWorkers, described.maxWorkers
        assert (len(slots) == 0) if low == 0 else (low <= len(slots) <= high)
        assert len({slot.id for slot in slots}) == len(slots)
        assert all(slot.is_wanted for slot in slots)
        assert {slot.id for slot in slots} >= {worker.id for worker in described.workers}

    def call(self, work: Coroutine[Any, Any, Any]) -> None:
        async def called() -> None:
            with contextlib.suppress(ServeError):  # any of ours will do, and no other
                await work

        self.calls.append(asyncio.create_task(called()))

    # Steps

    def register(
        self,
        name: str,
        url: str,
        workers: int,
        synchronous: bool,
        preload: bool,
        batch: tuple[int, int | None],
    ) -> None:
        size, delay_ms = batch
        self.call(
            self.hall.register(
                url,
                workers,
                model_name=name,
                synchronous=synchronous,
                preload_model=preload,
                batch_size=size,
                max_batch_delay_ms=delay_ms,
            )
        )

    def scale(self, name: str, one: int, other: int, synchronous: bool) -> None:
        low, high = sorted((one, other))
        self.call(self.hall.scale(name, low, high, synchronous=synchronous))

    def unregister(self, name: str) -> None:
        self.call(self.hall.registry.unregister(name))

    def ask(self, name: str, body: str, count: int) -> None:
        for _ in range(count):
            with contextlib.suppress(ServeError):
                self.outcomes.append(self.hall.ask(name, body))

    def leave(self, name: str) -> None:
        """A client that asks and goes: its job is cancelled."""
        with contextlib.suppress(ServeError):
            job = self.hall.submit(name, "sleep 0.002")
            job.is_cancelled = True

    def kill(self, which: int) -> None:
        """One of the workers or templates, or the library."""
        pids = sorted(self.hall.workers())
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[which % len(pids)], signal.SIGKILL)

    def kill_zygote(self) -> None:
        pid = self.hall.zygote.pid
        if pid and platform.is_own_child(pid):
            os.kill(pid, signal.SIGKILL)

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


@pytest.fixture(scope="module")
def hall(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hall]:
    place = tmp_path_factory.mktemp("store")
    opened = open_hall(
        place,
        imports=["colorsys"],
        unregister_model_timeout=1,
        max_worker_restarts=2,
        job_queue_size=20,
    )
    hall = runner.run(opened.__aenter__())
    for url, load in LOADS.items():
        hall.write(url, PREDICT, load=load)
    yield hall
    runner.run(opened.__aexit__(None, None, None))


@settings(
    max_examples=int(os.environ.get("MMSERVE_SEQUENCES", 25)),
    deadline=None,
    derandomize="MMSERVE_SEQUENCES" not in os.environ,
    database=None,
    phases=[Phase.generate],  # the same steps fail once and not again: nothing to shrink
    suppress_health_check=list(HealthCheck),
)
@given(steps=st.lists(step, min_size=5, max_size=30))
def test_any_sequence_leaves_nothing(
    hall: Hall, runner: asyncio.Runner, steps: list[tuple[Any, ...]]
) -> None:
    runner.run(Sequence(hall).play(steps))
