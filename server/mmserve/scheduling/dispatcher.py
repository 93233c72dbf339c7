"""Gives the jobs of one model to its workers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from mmserve.errors import (
    BadRequest,
    ModelGone,
    PredictionFailed,
    ServeError,
    WaitedTooLong,
    WorkerDied,
)
from mmserve.scheduling.batcher import Batcher
from mmserve.scheduling.job import Job, Result
from mmserve.wire.messages import Item, Outcome, Predict, Replies
from mmserve.workers.worker import Worker
from mmserve.workers.zygote import Exit, Zygote

#: A worker gets so much work in advance, by the mean time of its handler: for a quick handler the
#: way to the worker and back would else cost more than the work.
AHEAD_S = 0.002
MOST_AHEAD = 16
_SMOOTHING = 0.2


class Batch:
    """Jobs with one worker, and since when."""

    __slots__ = ("id", "jobs", "sent_at")

    def __init__(self, id: int, jobs: list[Job], sent_at: float) -> None:
        self.id, self.jobs, self.sent_at = id, jobs, sent_at


class Seat:
    """A ready worker and the batches it has, oldest first; only the first has begun.

    Attributes:
        ahead: batches that it may have beside the one it works on.
        is_offered: it stands in the queue of those that have room for a batch in advance.
        is_retired: it gets no batch any more.
    """

    __slots__ = ("ahead", "batches", "handler_s", "is_offered", "is_retired", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.batches: deque[Batch] = deque()
        self.handler_s = 0.0
        self.ahead = 0  # until a batch has told how long it takes
        self.is_offered = self.is_retired = False

    def learn(self, handler_s: float) -> None:
        """A batch took so long in the handler."""
        if self.handler_s:
            handler_s = self.handler_s + _SMOOTHING * (handler_s - self.handler_s)
        self.handler_s = max(handler_s, 1e-6)
        self.ahead = min(MOST_AHEAD, int(AHEAD_S / self.handler_s))

    @property
    def has_room_ahead(self) -> bool:
        return 0 < len(self.batches) <= self.ahead and not self.is_retired


class Dispatcher:
    """The queue of one model and the workers that empty it.

    It runs in the event loop's thread and has no task: a put, a reply, the coming and going of a
    worker and two timers move it.

    Args:
        response_timeout_s: how long a worker may have a batch; 0 for no time at all.
    """

    def __init__(
        self, model: str, batcher: Batcher, zygote: Zygote, *, response_timeout_s: float
    ) -> None:
        self._model, self._batcher, self._zygote = model, batcher, zygote
        self._response_timeout_s = response_timeout_s
        self._loop = asyncio.get_running_loop()
        self._seats: dict[Worker, Seat] = {}
        self._idle: list[Seat] = []
        self._offers: deque[Seat] = deque()  # busy, but with room for a batch in advance
        self._in_advance = 0
        self._next_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._watch: asyncio.TimerHandle | None = None
        self._kills: set[asyncio.Task[None]] = set()
        self._ran_dry: asyncio.Future[None] | None = None  # somebody waits for the end of work
        self.refusal: ServeError | None = None  # why no job is taken, whatever the queue says
        self.last_used = time.monotonic()

    @property
    def has_work(self) -> bool:
        """Whether a job waits or is with a worker."""
        return bool(len(self._batcher)) or any(seat.batches for seat in self._seats.values())

    async def without_work(self) -> None:
        """Returns when nothing waits and nothing is with a worker; used once, at the end."""
        if self.has_work:
            self._ran_dry = self._loop.create_future()
            await self._ran_dry

    # Jobs

    def submit(self, job: Job) -> None:
        """Raises QueueFull, or `refusal`."""
        if self.refusal is not None:
            raise self.refusal
        now = self.last_used = time.monotonic()
        batcher = self._batcher
        if self._idle and batcher.size == 1 and not len(batcher):
            job.put_at = now
            self._send(self._idle.pop(), [job], now)
            return
        batcher.put(job, now, in_advance=self._in_advance)
        self._pump(now)

    def refuse(self, why: ServeError | None) -> None:
        """Takes no job any more (None: again), and answers those that wait."""
        self.refusal = why
        if why is not None:
            for job in self._batcher.drain():
                job.deliver(why)
            self._set_timer()

    def forget_queue(self) -> None:
        """The model goes: answers what waits, and takes nothing."""
        self.refuse(ModelGone(self._model))

    def _pump(self, now: float) -> None:
        batcher = self._batcher
        while self._idle and (jobs := batcher.take(now)):
            self._send(self._idle.pop(), jobs, now)
        # While all are busy a batch that is not full may still grow.
        while self._offers and len(batcher) >= batcher.size and (seat := self._next_offer()):
            if not (jobs := batcher.take(now)):
                self._offer(seat)
                break
            self._send(seat, jobs, now)
        self._set_timer()

    def _offer(self, seat: Seat) -> None:
        if not seat.is_offered and seat.has_room_ahead:
            seat.is_offered = True
            self._offers.append(seat)

    def _next_offer(self) -> Seat | None:
        """The seat that has waited longest for work in advance, if it still has room."""
        while self._offers:
            seat = self._offers.popleft()
            seat.is_offered = False
            if seat.has_room_ahead:
                return seat
        return None

    def _send(self, seat: Seat, jobs: list[Job], now: float) -> None:
        self._next_id += 1
        items, parts = [], []
        for job in jobs:
            entries = []
            for parameter, value in job.parameters:
                entries.append(parameter)
                parts.append(value)
            items.append(Item(job.request_id, job.headers, entries))
        is_ahead = bool(seat.batches)
        if is_ahead:
            self._in_advance += len(jobs)
        seat.batches.append(Batch(self._next_id, jobs, now))
        self._offer(seat)
        worker = seat.worker
        worker.began()
        # What it cannot begin yet may wait for its neighbours, to be sent with one system call.
        worker.send(Predict(self._next_id, items), parts, soon=is_ahead)
        if self._watch is None:
            self._watch = self._loop.call_later(self._response_timeout_s, self._look_for_late)

    # Workers (pool.Hooks)

    def worker_ready(self, worker: Worker) -> None:
        seat = self._seats[worker] = Seat(worker)
        worker.on_replies = lambda message, payload: self._replied(seat, message, payload)
        self._idle.append(seat)
        self._pump(time.monotonic())

    def worker_retired(self, worker: Worker) -> None:
        seat = self._seats.get(worker)
        if seat is None or seat.is_retired:
            return
        seat.is_retired = True
        if seat in self._idle:
            self._idle.remove(seat)

    def worker_gone(self, worker: Worker, how: Exit) -> None:
        seat = self._seats.pop(worker, None)
        if seat is None:
            return
        seat.is_retired = True
        if seat in self._idle:
            self._idle.remove(seat)
        while len(seat.batches) > 1:
            self._put_back(seat.batches.pop())
        if seat.batches:
            out_of_memory = how.was_out_of_memory and not worker.was_killed_by_us
            died = WorkerDied(worker.end_text(how), out_of_memory=out_of_memory)
            _deliver_to_all(seat.batches.pop().jobs, died)
        self._pump(time.monotonic())
        self._look_whether_dry()

    def _put_back(self, batch: Batch) -> None:
        self._in_advance -= len(batch.jobs)
        if self.refusal is not None:
            _deliver_to_all(batch.jobs, self.refusal)
        else:
            self._batcher.put_back([job for job in batch.jobs if not job.is_cancelled])

    # Replies

    def _replied(self, seat: Seat, message: Replies, payload: memoryview) -> None:
        batch = seat.batches.popleft()
        worker = seat.worker
        worker.finished()
        seat.learn(message.handler_s)
        now = time.monotonic()
        if seat.batches:  # it works on what was sent in advance
            begun = seat.batches[0]
            begun.sent_at = now
            self._in_advance -= len(begun.jobs)
            self._offer(seat)
        elif not seat.is_retired:
            self._idle.append(seat)
        # The worker's next work first: it need not wait while we write replies.
        if len(self._batcher):
            self._pump(now)
        _deliver(batch, message, payload)
        if self._ran_dry is not None:
            self._look_whether_dry()

    def _look_whether_dry(self) -> None:
        if self._ran_dry is not None and not self._ran_dry.done() and not self.has_work:
            self._ran_dry.set_result(None)

    # Time

    def _set_timer(self) -> None:
        """Wakes us when a batch is due though not full, or a job has waited too long."""
        batcher = self._batcher
        if not len(batcher):
            return  # a timer that is set finds nothing to do
        at = batcher.next_expiry()
        if self._idle:
            at = min(at, batcher.next_deadline())
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        delay_s = max(0.0, at - time.monotonic())
        self._timer = self._loop.call_later(delay_s, self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        now = time.monotonic()
        late = self._batcher.expire(now)
        for job in late:
            job.deliver(WaitedTooLong(self._model, self._batcher.max_wait_s))
        # A timer may ring a little early; what is due within its resolution is due.
        self._pump(now + 0.001)
        self._look_whether_dry()

    def _look_for_late(self) -> None:
        """Kills the workers that have had their batch too long; one timer for all of them."""
        self._watch = None
        now = time.monotonic()
        oldest = float("inf")
        for seat in self._seats.values():
            if not seat.batches:
                continue
            if seat.batches[0].sent_at + self._response_timeout_s <= now + 0.001:
                why = (
                    f"The prediction took longer than {self._response_timeout_s:g} s; "
                    "default_response_timeout_seconds sets the limit."
                )
                task = self._loop.create_task(seat.worker.kill(self._zygote, why))
                self._kills.add(task)
                task.add_done_callback(self._kills.discard)
            else:
                oldest = min(oldest, seat.batches[0].sent_at)
        if oldest < float("inf"):
            delay_s = max(0.0, oldest + self._response_timeout_s - now)
            self._watch = self._loop.call_later(delay_s, self._look_for_late)

    def close(self) -> None:
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        self._timer = self._watch = None


def _deliver(batch: Batch, message: Replies, payload: memoryview) -> None:
    at = 0
    for job, outcome in zip(batch.jobs, message.outcomes, strict=True):
        end = at + outcome.size
        if not job.is_cancelled:
            answer = _answer(outcome, payload[at:end])
            if isinstance(answer, Result):
                answer.queue_s = batch.sent_at - job.put_at
                answer.handler_s = message.handler_s
            job.deliver(answer)
        at = end


def _answer(outcome: Outcome, body: memoryview) -> Result | ServeError:
    if outcome.error is None:
        return Result(outcome.status, outcome.phrase, outcome.headers, body, outcome.is_json)
    if outcome.is_bad_request:
        return BadRequest(outcome.error)
    return PredictionFailed(outcome.status, outcome.error)


def _deliver_to_all(jobs: Sequence[Job], error: ServeError) -> None:
    for job in jobs:
        if not job.is_cancelled:
            job.deliver(error)
