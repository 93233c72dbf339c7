"""Gives the jobs of one model to its workers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from time import monotonic

from mmserve.errors import (
    BadRequest,
    ModelGone,
    PredictionFailed,
    ServeError,
    WaitedTooLong,
    WorkerDied,
)
from mmserve.scheduling.batcher import Batcher
from mmserve.scheduling.busy_poll import BusyPoll
from mmserve.scheduling.job import Job, Result
from mmserve.wire.framing import WireError
from mmserve.wire.messages import Item, Outcome, Predict, Replies
from mmserve.workers.exits import Exit
from mmserve.workers.worker import Worker

log = logging.getLogger("mmserve.scheduling")

#: A worker gets so much work in advance, by the mean time of its handler: for a quick handler the
#: way to the worker and back would else cost more than the work.
AHEAD_S = 0.002
MOST_AHEAD = 16
_MOST_BELOW_S = AHEAD_S / MOST_AHEAD
_SMOOTHING = 0.2
#: A timer may ring a little early; what is due within its resolution is due.
_RESOLUTION_S = 0.001
_NEVER = float("inf")


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
        if mean_s := self.handler_s:
            handler_s = mean_s + _SMOOTHING * (handler_s - mean_s)
        self.handler_s = handler_s = max(handler_s, 1e-6)
        self.ahead = MOST_AHEAD if handler_s < _MOST_BELOW_S else int(AHEAD_S / handler_s)

    @property
    def has_room_ahead(self) -> bool:
        return 0 < len(self.batches) <= self.ahead and not self.is_retired


class Dispatcher:
    """The queue of one model and the workers that empty it.

    It runs in the event loop's thread and has no task: a put, a reply, the coming and going of a
    worker and two timers move it. Every job that `submit` takes gets one outcome.

    Args:
        response_timeout_s: how long a worker may have a batch; 0 for no time at all, infinity
            for no limit.
        busy_poll: keeps the loop awake where a worker or a client answers at once.
    """

    def __init__(
        self, model: str, batcher: Batcher, *, response_timeout_s: float, busy_poll: BusyPoll
    ) -> None:
        self._model, self._batcher = model, batcher
        self._response_timeout_s = response_timeout_s
        self._busy_poll = busy_poll
        self._loop = asyncio.get_running_loop()
        self._seats: dict[Worker, Seat] = {}
        self._idle: list[Seat] = []
        self._offers: deque[Seat] = deque()  # busy, but with room for a batch in advance
        self._in_advance = 0
        self._next_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = _NEVER
        self._watch: asyncio.TimerHandle | None = None
        self._ran_dry: list[asyncio.Future[None]] = []  # somebody waits for the end of work
        self.refusal: ServeError | None = None  # why no job is taken, whatever the queue says

    @property
    def has_work(self) -> bool:
        """Whether a job waits or is with a worker."""
        return self._batcher.has_jobs or any(seat.batches for seat in self._seats.values())

    async def without_work(self) -> None:
        """Returns when nothing waits and nothing is with a worker."""
        while self.has_work:
            dry = self._loop.create_future()
            self._ran_dry.append(dry)
            await dry

    # Jobs

    def submit(self, job: Job) -> None:
        """Raises QueueFull, or `refusal`."""
        if self.refusal is not None:
            raise self.refusal
        now = job.put_at = monotonic()
        batcher = self._batcher
        if self._idle and batcher.size == 1 and not len(batcher):
            self._send(self._idle.pop(), [job], now)
            return
        batcher.put(job, now, in_advance=self._in_advance)
        if self._idle or self._offers:
            self._pump(now)
        elif self._timer is None:
            self._set_timer(now)

    def refuse(self, why: ServeError | None) -> None:
        """Takes no job any more (None: again), and answers those that wait."""
        self.refusal = why
        if why is not None:
            _deliver_to_all(self._batcher.drain(), why)
            self._look_whether_dry()

    def forget_queue(self) -> None:
        """The model goes: answers what waits, and takes nothing."""
        self.refuse(ModelGone(self._model))

    def _pump(self, now: float) -> None:
        """Hands out what is due."""
        batcher = self._batcher
        while self._idle and (jobs := batcher.take(now)):
            self._send(self._idle.pop(), jobs, now)
        # While all are busy a batch that is not full may still grow.
        while self._offers and len(batcher) >= batcher.size and (seat := self._next_offer()):
            if not (jobs := batcher.take(now)):
                self._offer(seat)
                break
            self._send(seat, jobs, now)
        if len(batcher):
            self._set_timer(now)

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
        self._next_id = id = self._next_id + 1
        items, parts = [], []
        for job in jobs:
            entries = []
            for parameter, value in job.parameters:
                entries.append(parameter)
                if value:
                    parts.append(value)
            items.append(Item(job.request_id, job.headers, entries))
        batches = seat.batches
        is_ahead = bool(batches)
        if is_ahead:
            self._in_advance += len(jobs)
        batches.append(Batch(id, jobs, now))
        if seat.ahead and not seat.is_offered:
            self._offer(seat)
        worker = seat.worker
        worker.in_flight += 1
        # What it cannot begin yet may wait for its neighbours, to be sent with one system call.
        worker.send(Predict(id, items), parts, soon=is_ahead)
        if not is_ahead and (handler_s := seat.handler_s):
            self._busy_poll.sent(handler_s, now)
        if self._watch is None and self._response_timeout_s < _NEVER:
            self._watch = self._loop.call_later(self._response_timeout_s, self._look_for_late)

    # Workers (pool.Hooks)

    def worker_ready(self, worker: Worker) -> None:
        seat = self._seats[worker] = Seat(worker)
        worker.on_replies = partial(self._replied, seat)
        self._idle.append(seat)
        self._pump(monotonic())

    def worker_retired(self, worker: Worker) -> None:
        seat = self._seats.get(worker)
        if seat is None or seat.is_retired:
            return
        seat.is_retired = True
        if seat in self._idle:
            self._idle.remove(seat)

    def worker_gone(self, worker: Worker, how: Exit) -> None:
        self.worker_retired(worker)
        seat = self._seats.pop(worker, None)
        if seat is None:
            return
        # Of several batches it may have begun the first, whatever is unread. And what made us kill
        # a worker is not tried again.
        if len(seat.batches) == 1 and worker.has_unread and not worker.is_killed:
            self._put_back(seat.batches.pop(), was_in_advance=False)
        while len(seat.batches) > 1:
            self._put_back(seat.batches.pop(), was_in_advance=True)
        if seat.batches:
            died = WorkerDied(worker.end_text(how), out_of_memory=how.was_out_of_memory)
            _deliver_to_all(seat.batches.pop().jobs, died)
        self._pump(monotonic())
        self._look_whether_dry()

    def _put_back(self, batch: Batch, *, was_in_advance: bool) -> None:
        """Jobs that a worker had not begun: they are the next."""
        if was_in_advance:
            self._in_advance -= len(batch.jobs)
        if self.refusal is not None:
            _deliver_to_all(batch.jobs, self.refusal)
        else:
            self._batcher.put_back([job for job in batch.jobs if not job.is_cancelled])

    # Replies

    def _replied(self, seat: Seat, message: Replies, payload: memoryview) -> None:
        batches = seat.batches
        if not batches or batches[0].id != message.batch_id:
            raise WireError("it answers what it was not asked")
        batch = batches[0]
        if len(message.outcomes) != len(batch.jobs):
            raise WireError("it answers another number of requests than it was asked")
        now = monotonic()
        batches.popleft()
        seat.worker.in_flight -= 1
        seat.learn(message.handler_s)
        if batches:  # it works on what was sent in advance
            begun = batches[0]
            begun.sent_at = now
            self._in_advance -= len(begun.jobs)
            if not seat.is_offered:
                self._offer(seat)
        elif not seat.is_retired:
            self._idle.append(seat)
        # The worker's next work first: it need not wait while we write replies.
        if len(self._batcher):
            self._pump(now)
        _deliver(batch, message, payload)
        self._busy_poll.answered(seat.handler_s, now)
        if self._ran_dry:
            self._look_whether_dry()

    def _look_whether_dry(self) -> None:
        if self._ran_dry and not self.has_work:
            for dry in self._ran_dry:
                if not dry.done():
                    dry.set_result(None)
            self._ran_dry.clear()

    # Time

    def _set_timer(self, now: float) -> None:
        """Wakes us when a batch is due though not full, or a job has waited too long.

        A timer that is not needed any more rings all the same: to take it back would cost more.
        """
        batcher = self._batcher
        at = batcher.next_expiry()
        if self._idle:
            at = min(at, batcher.next_deadline())
        if at >= self._timer_at or at == _NEVER:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - now), self._time_has_come)

    def _time_has_come(self) -> None:
        self._timer, self._timer_at = None, _NEVER
        now = monotonic() + _RESOLUTION_S
        late = self._batcher.expire(now)
        _deliver_to_all(late, WaitedTooLong(self._model, self._batcher.max_wait_s))
        self._pump(now)
        self._look_whether_dry()

    def _look_for_late(self) -> None:
        """Kills the workers that have had their batch too long; one timer for all of them."""
        self._watch = None
        now = monotonic()
        oldest = _NEVER
        for seat in list(self._seats.values()):
            if not seat.batches:
                continue
            if seat.batches[0].sent_at + self._response_timeout_s <= now + _RESOLUTION_S:
                self.worker_retired(seat.worker)
                seat.worker.kill(
                    f"The prediction took longer than {self._response_timeout_s:g} s; "
                    "default_response_timeout_seconds sets the limit."
                )
            else:
                oldest = min(oldest, seat.batches[0].sent_at)
        if oldest < _NEVER:
            delay_s = max(0.0, oldest + self._response_timeout_s - now)
            self._watch = self._loop.call_later(delay_s, self._look_for_late)

    def close(self) -> None:
        """Nothing moves any more. Who still has a worker that cannot be ended is answered."""
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()
        self._timer = self._watch = None
        for seat in self._seats.values():
            while seat.batches:
                _deliver_to_all(
                    seat.batches.popleft().jobs, WorkerDied("Its process does not end.")
                )
        self._seats.clear()


def _deliver(batch: Batch, message: Replies, payload: memoryview) -> None:
    at = 0
    for job, outcome in zip(batch.jobs, message.outcomes, strict=True):
        end = at + outcome.size
        if not job.is_cancelled:
            answer = _answer(outcome, payload[at:end])
            if type(answer) is Result:
                answer.queue_s = batch.sent_at - job.put_at
                answer.handler_s = message.handler_s
            _hand(job, answer)
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
            _hand(job, error)


def _hand(job: Job, outcome: Result | ServeError) -> None:
    """A failure of one who waits is no reason to forget the others."""
    try:
        job.deliver(outcome)
    except Exception:
        log.exception("an outcome cannot be delivered", extra={"request": job.request_id})
