"""Whatever workers and clients do: each job gets one outcome, and no worker more than it may."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmserve.errors import (
    ModelGone,
    NoWorker,
    QueueFull,
    ServeError,
    WorkerDied,
)
from mmserve.scheduling.batcher import Batcher
from mmserve.scheduling.busy_poll import BusyPoll
from mmserve.scheduling.dispatcher import AHEAD_S, MOST_AHEAD, Dispatcher
from mmserve.scheduling.job import Job, Result
from mmserve.wire.framing import WireError
from mmserve.wire.messages import Outcome, Parameter, Predict, Replies
from mmserve.workers.exits import Exit

INFINITY = float("inf")
CAPACITY = 12


class StandIn:
    """A worker without a process: it keeps the batches that it is sent."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.has_unread = self.is_killed = False
        self.sent: list[Predict] = []
        self.on_replies: Any = None

    def send(
        self, message: Predict, parts: Sequence[bytes | memoryview] = (), *, soon: bool = False
    ) -> None:
        assert not self.is_killed
        self.sent.append(message)

    def kill(self, why: str = "") -> None:
        self.is_killed = True

    def end_text(self, how: Exit | None) -> str:
        return str(how)

    def answer(self, handler_s: float = 1.0) -> None:
        """To the oldest batch."""
        batch = self.sent.pop(0)
        bodies = [item.request_id.encode() for item in batch.items]
        outcomes = [Outcome(200, len(body)) for body in bodies]
        payload = memoryview(b"".join(bodies))
        self.on_replies(Replies(batch.batch_id, outcomes, [], handler_s), payload)


class Asked:
    """A job and what became of it."""

    def __init__(self, number: int) -> None:
        self.outcomes: list[Result | ServeError] = []
        parameters: list[tuple[Parameter, bytes | memoryview]] = [(Parameter("body", 1), b"x")]
        self.job = Job(str(number), [], parameters, self.outcomes.append)

    @property
    def is_settled(self) -> bool:
        return bool(self.outcomes) or self.job.is_cancelled


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.asked: list[Asked] = []
        self.workers: list[StandIn] = []  # that have not ended
        self.retired: dict[StandIn, int] = {}  # with what it had been sent
        self.begun: set[str] = set()
        self.is_closed = False

    @initialize(size=st.integers(1, 4))
    def open(self, size: int) -> None:
        async def made() -> Dispatcher:
            batcher = Batcher("m", CAPACITY, size, 0.0, INFINITY)
            return Dispatcher("m", batcher, response_timeout_s=INFINITY, busy_poll=BusyPoll(0.0))

        self.size = size
        self.dispatcher = self.loop.run_until_complete(made())

    @rule(count=st.integers(1, 8))
    def ask(self, count: int) -> None:
        for _ in range(count):
            asked = Asked(len(self.asked))
            try:
                self.dispatcher.submit(asked.job)
            except (QueueFull, NoWorker, ModelGone):
                assert not asked.outcomes
            else:
                self.asked.append(asked)

    @rule(data=st.data())
    @precondition(lambda self: any(not one.is_settled for one in self.asked))
    def cancel(self, data: st.DataObject) -> None:
        open_ones = [one for one in self.asked if not one.is_settled]
        data.draw(st.sampled_from(open_ones)).job.is_cancelled = True

    @rule()
    @precondition(lambda self: len(self.workers) < 4)
    def ready(self) -> None:
        worker = StandIn()
        self.workers.append(worker)
        self.dispatcher.worker_ready(worker)  # type: ignore[arg-type] # a stand-in

    @rule(data=st.data(), handler_s=st.sampled_from([0.0, 1e-5, AHEAD_S / 3, 1.0]))
    @precondition(lambda self: any(worker.sent for worker in self.workers))
    def answer(self, data: st.DataObject, handler_s: float) -> None:
        busy = [worker for worker in self.workers if worker.sent]
        worker = data.draw(st.sampled_from(busy))
        worker.answer(handler_s)
        if worker in self.retired:
            self.retired[worker] -= 1

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def nonsense(self, data: st.DataObject) -> None:
        """An answer to what was not asked changes nothing."""
        worker = data.draw(st.sampled_from(self.workers))
        before = worker.in_flight
        wrong = [Replies(0, [Outcome(200, 0)], [], 0.1)]
        if worker.sent:
            batch = worker.sent[0]
            outcomes = [Outcome(200, 0)] * (len(batch.items) + 1)
            wrong.append(Replies(batch.batch_id, outcomes, [], 0.1))
        for message in wrong:
            with pytest.raises(WireError):
                worker.on_replies(message, memoryview(b""))
        assert worker.in_flight == before

    @rule(data=st.data())
    @precondition(lambda self: self.workers)
    def retire(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.dispatcher.worker_retired(worker)  # type: ignore[arg-type]
        self.retired.setdefault(worker, len(worker.sent))

    @rule(data=st.data(), unread=st.booleans())
    @precondition(lambda self: self.workers)
    def die(self, data: st.DataObject, unread: bool) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        self.workers.remove(worker)
        self.retired.pop(worker, None)
        worker.has_unread = unread
        had = {item.request_id for batch in worker.sent[:1] for item in batch.items}
        ahead = {item.request_id for batch in worker.sent[1:] for item in batch.items}
        may_survive = unread and len(worker.sent) == 1
        self.dispatcher.worker_gone(worker, Exit(-9))  # type: ignore[arg-type]
        for one in self.asked:
            died = [outcome for outcome in one.outcomes if isinstance(outcome, WorkerDied)]
            if one.job.request_id in had and not one.job.is_cancelled:
                assert may_survive != bool(died)
            elif one.job.request_id in ahead:
                assert not died

    @rule(refuses=st.booleans())
    def refuse(self, refuses: bool) -> None:
        if not self.is_closed:
            self.dispatcher.refuse(NoWorker("m") if refuses else None)

    @invariant()
    def nobody_has_more_than_one_outcome_or_another_ones(self) -> None:
        for one in self.asked:
            assert len(one.outcomes) <= 1
            for outcome in one.outcomes:
                if isinstance(outcome, Result):
                    assert bytes(outcome.body).decode() == one.job.request_id

    @invariant()
    def no_worker_has_more_than_it_may(self) -> None:
        for worker in self.workers:
            assert worker.in_flight == len(worker.sent) <= 1 + MOST_AHEAD
            assert all(len(batch.items) <= self.size for batch in worker.sent)
            if worker in self.retired:
                assert len(worker.sent) == self.retired[worker]

    @invariant()
    def no_more_wait_than_the_capacity_says(self) -> None:
        ahead = sum(len(batch.items) for worker in self.workers for batch in worker.sent[1:])
        waiting = ahead + len(self.dispatcher._batcher)
        # What was given back waits beside what was taken meanwhile.
        assert self.dispatcher._in_advance == ahead
        assert waiting <= CAPACITY + self.size * (1 + MOST_AHEAD)

    @invariant()
    def no_worker_is_idle_while_somebody_waits(self) -> None:
        idle = [one for one in self.workers if not one.sent and one not in self.retired]
        assert not idle or not self.dispatcher._batcher.has_jobs

    @invariant()
    def everybody_is_somewhere(self) -> None:
        with_workers = {
            item.request_id
            for worker in self.workers
            for batch in worker.sent
            for item in batch.items
        }
        waiting = {job.request_id for job in self.dispatcher._batcher._jobs}
        for one in self.asked:
            places = (one.job.request_id in with_workers) + (one.job.request_id in waiting)
            assert places == (0 if one.outcomes else 1) or one.job.is_cancelled

    def teardown(self) -> None:
        if hasattr(self, "dispatcher"):
            self.dispatcher.forget_queue()
            self.dispatcher.close()  # whatever still has a worker is answered
            assert all(len(one.outcomes) + one.job.is_cancelled >= 1 for one in self.asked)
        self.loop.close()


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDispatcher = Machine.TestCase
