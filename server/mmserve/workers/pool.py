"""The workers of one model: as many as wanted, each started anew when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Protocol

import msgspec

from mmserve.errors import WorkersFailed
from mmserve.workers.blueprint import Blueprint
from mmserve.workers.exits import Exit
from mmserve.workers.launcher import Launcher, Template
from mmserve.workers.life import Restarts, State
from mmserve.workers.worker import Worker, first_of

log = logging.getLogger("mmserve.workers")

#: Seconds until another successor is tried for a worker that has served or grown enough.
NEXT_TRY_S = 30.0


class Hooks(Protocol):
    """Who gives the workers their work."""

    def worker_ready(self, worker: Worker) -> None: ...

    def worker_retired(self, worker: Worker) -> None:
        """It takes no new batch from now on. Told of one that is not known, or twice: nothing."""

    def worker_gone(self, worker: Worker, how: Exit) -> None:
        """Its process is reaped; what it had will not be answered."""

    def worker_metrics(self, lines: list[str]) -> None:
        """Finished metric lines that the handler made."""

    def worker_failed(self) -> None:
        """It did not come up; its slot knows why, and will try again."""

    def workers_given_up(self, cause: WorkersFailed) -> None:
        """`max_worker_restarts` is reached."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How long workers live.

    Attributes:
        max_restarts: in a row, before a worker is given up; None for no limit.
        max_requests: after which a worker is replaced; None for never.
        memory_limit: resident bytes above which a worker is replaced; None for never.
    """

    max_restarts: int | None = None
    max_requests: int | None = None
    memory_limit: int | None = None


class Slot:
    """One of the workers that are wanted, whichever process it is at the moment.

    Attributes:
        number: its place among the slots that the model had so far.
        started: when it was asked for, as `describe` shows it.
        worker: serves, or is on its way; None before the first try.
        first_attempt: the outcome of the first start; None for a success.
        task: keeps the slot; done once no process of it is left.
    """

    def __init__(self, port: int, number: int, gpu_id: int | None, started: str) -> None:
        loop = asyncio.get_running_loop()
        self.id = f"{port}-{uuid.uuid4().hex[:8]}"
        self.number, self.gpu_id, self.started = number, gpu_id, started
        self.worker: Worker | None = None
        self.successor: Worker | None = None  # on its way to take the place of `worker`
        self.retiring: dict[Worker, asyncio.Task[None]] = {}  # replaced, with a last batch
        self.is_given_up = False
        self.failure: WorkersFailed | None = None
        self.unwanted: asyncio.Future[None] = loop.create_future()
        self.first_attempt: asyncio.Future[WorkersFailed | None] = loop.create_future()
        self.task: asyncio.Task[None]

    @property
    def is_wanted(self) -> bool:
        return not self.unwanted.done()

    def workers(self) -> Iterator[Worker]:
        """All that may have a process."""
        for worker in (self.worker, self.successor, *self.retiring):
            if worker is not None and worker.state is not State.STOPPED:
                yield worker

    def attempted(self, failure: WorkersFailed | None) -> None:
        self.failure = failure
        if not self.first_attempt.done():
            self.first_attempt.set_result(failure)

    @property
    def is_alive(self) -> bool:
        """Whether its worker serves or starts, and is not between two tries."""
        if self.worker is None:
            return not self.first_attempt.done()
        return self.worker.state is not State.STOPPED


class _Mould:
    """A template from its start to its end.

    Attributes:
        made: the template, or why there is none.
        dropped: done once it is not needed any more.
        task: done once its process is gone, or is an ordinary worker.
    """

    def __init__(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        self.worker = worker
        self.made: asyncio.Future[Template | WorkersFailed] = loop.create_future()
        self.dropped: asyncio.Future[None] = loop.create_future()
        self.task: asyncio.Task[None]
        self._forks = 0
        self._last_fork: asyncio.Future[None] | None = None  # somebody waits for it

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """While a worker is forked from it: nobody would know of one that is born behind it."""
        self._forks += 1
        try:
            yield
        finally:
            self._forks -= 1
            if not self._forks and self._last_fork is not None:
                self._last_fork.set_result(None)
                self._last_fork = None

    async def without_forks(self) -> None:
        while self._forks:
            if self._last_fork is None:
                self._last_fork = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._last_fork)

    @property
    def template(self) -> Template:
        """Once it is made."""
        made = self.made.result()
        assert isinstance(made, Template)
        return made

    @property
    def is_spent(self) -> bool:
        """There is nothing to be had from it."""
        if not self.made.done():
            return False
        made = self.made.result()
        return isinstance(made, WorkersFailed) or made.is_spent

    def drop(self) -> None:
        if not self.dropped.done():
            self.dropped.set_result(None)
        if not self.made.done():
            self.worker.abort()


class Pool:
    """Keeps the wanted number of workers of one model.

    Args:
        spawn: starts a task that somebody owns.
        assign_gpu: gives the device of a new worker.
        port: number that the ids of these workers begin with.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        launcher: Launcher,
        hooks: Hooks,
        policy: Policy,
        *,
        spawn: Callable[[Coroutine[object, object, None]], asyncio.Task[None]],
        assign_gpu: Callable[[], int | None],
        now_text: Callable[[], str],
        port: int,
    ) -> None:
        self.blueprint = blueprint
        self._launcher, self._hooks, self._policy = launcher, hooks, policy
        self._spawn, self._assign_gpu, self._now_text = spawn, assign_gpu, now_text
        self._port, self._numbers = port, itertools.count(1)
        self.slots: list[Slot] = []
        self.leaving: set[Slot] = set()
        self._mould: _Mould | None = None
        self._moulds: set[_Mould] = set()  # this one, and those whose process may still be there

    # Scaling

    def grow(self, count: int) -> list[Slot]:
        """Starts `count` more workers."""
        slots = [
            Slot(self._port, next(self._numbers), self._assign_gpu(), self._now_text())
            for _ in range(count)
        ]
        self.slots += slots
        for slot in slots:
            slot.task = self._spawn(self._keep(slot))
        return slots

    def forget_given_up(self) -> None:
        """Takes out the slots that nobody fills any more."""
        self.slots = [slot for slot in self.slots if not slot.is_given_up]

    def pick_leaving(self, count: int) -> list[Slot]:
        """Takes `count` workers out: those that serve nobody yet first, then the newest.

        They get no new batch, and those that are not ready are killed; `leave` does the rest.
        """
        order = sorted(
            range(len(self.slots)),
            key=lambda i: (_is_ready(self.slots[i]), _is_busy(self.slots[i]), -i),
        )
        chosen = [self.slots[i] for i in order[:count]]
        self.slots = [slot for slot in self.slots if slot not in chosen]
        self.leaving.update(chosen)
        for slot in chosen:
            slot.unwanted.set_result(None)
            for worker in slot.workers():
                if worker.life.was_ready:
                    worker.ask_to_stop()
                    self._hooks.worker_retired(worker)
                else:
                    worker.abort()
        return chosen

    async def leave(self, slots: Iterable[Slot], *, timeout_s: float) -> None:
        """Stops workers taken out by `pick_leaving`: what runs may finish within the timeout."""
        tasks = {slot.task for slot in slots}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=max(0.0, timeout_s))
            if late:
                _cut(slots)
                await asyncio.wait(late)
        self.leaving.difference_update(slots)

    async def close(self, *, timeout_s: float) -> None:
        """Stops them all, the template too. Returns when their processes are reaped."""
        self.pick_leaving(len(self.slots))
        self.drop_template()
        await self.leave(list(self.leaving), timeout_s=timeout_s)
        for mould in list(self._moulds):
            await asyncio.wait({mould.task})

    def cut(self) -> None:
        """Ends the running batches of those that leave."""
        _cut(self.leaving)

    def drop_template(self) -> None:
        """Ends the template, where there is one."""
        mould, self._mould = self._mould, None
        if mould is not None:
            mould.drop()

    # One slot

    async def _keep(self, slot: Slot) -> None:
        restarts = Restarts(self._policy.max_restarts)
        try:
            while slot.is_wanted:
                was_used, ready_s = await self._live_once(slot)
                pause_s = restarts.pause_s(was_used=was_used, ready_s=ready_s)
                if not slot.is_wanted:
                    break
                if pause_s is None:
                    self._give_up(slot)
                    break
                if pause_s:
                    await asyncio.wait({slot.unwanted}, timeout=pause_s)
        finally:
            slot.attempted(slot.failure or WorkersFailed("it was stopped"))
        if slot.retiring:
            await asyncio.wait(slot.retiring.values())

    def _give_up(self, slot: Slot) -> None:
        slot.is_given_up = True
        failure = slot.failure or WorkersFailed("it kept ending")
        log.error("worker given up", extra=self._fields(slot, cause=failure.cause))
        self._hooks.workers_given_up(failure)

    async def _live_once(self, slot: Slot) -> tuple[bool, float]:
        """From the start of a process to the end of the last one that took its place.

        Returns:
            Whether the last one was of use, and seconds that it was ready, for `Restarts`.
        """
        worker = slot.worker = self._new_worker(slot)
        try:
            worker = slot.worker = await self._launch(slot, worker)
        except WorkersFailed as failure:
            await worker.stop(grace_s=0)
            if slot.is_wanted:
                log.warning("worker failed to start", extra=self._fields(slot, cause=failure.cause))
                if slot.failure is None or slot.failure.cause != failure.cause:  # not every time
                    self._launcher.log_as_output(worker, failure.trace)
            slot.attempted(failure)
            self._hooks.worker_failed()
            return False, 0.0
        self._announce(slot, worker)
        while not worker.ended.done():
            await first_of(worker.ended, worker.outgrown, slot.unwanted)
            if not slot.is_wanted:
                await _drain(worker)
            elif worker.outgrown.done():
                worker = await self._replace(slot, worker)
        return worker.was_used, time.monotonic() - worker.ready_at

    async def _replace(self, slot: Slot, old: Worker) -> Worker:
        """The successor of a worker that has served or grown enough; itself where none comes."""
        old.stay()
        new = slot.successor = self._new_worker(slot)
        try:
            new = await self._launch(slot, new)
        except WorkersFailed as failure:
            await new.stop(grace_s=0)
            if slot.is_wanted:
                log.warning(
                    "no successor for a worker", extra=self._fields(slot, cause=failure.cause)
                )
                old.set_limits(None, None)
                old.stay()  # it may have outgrown them again meanwhile
                asyncio.get_running_loop().call_later(NEXT_TRY_S, old.outgrow)
            return old
        finally:
            slot.successor = None
        slot.worker = new
        self._announce(slot, new)
        self._hooks.worker_retired(old)
        slot.retiring[old] = self._spawn(self._retire(slot, old))
        return new

    async def _retire(self, slot: Slot, old: Worker) -> None:
        await _drain(old)
        del slot.retiring[old]

    def _announce(self, slot: Slot, worker: Worker) -> None:
        fields = self._fields(slot, pid=worker.pid, load_s=round(worker.load_s, 3))
        fields["start"] = worker.start
        if worker.start_reason:
            fields["reason"] = worker.start_reason
        log.info("worker ready", extra=fields)
        if not slot.is_wanted:  # in the very moment
            return
        worker.set_limits(self._policy.max_requests, self._policy.memory_limit)
        worker.on_lost = self._hooks.worker_retired
        worker.ended.add_done_callback(lambda ended: self._gone(slot, worker, ended.result()))
        slot.attempted(None)
        self._hooks.worker_ready(worker)

    def _gone(self, slot: Slot, worker: Worker, how: Exit | None) -> None:
        if slot.is_wanted and worker not in slot.retiring:
            fields = self._fields(slot, pid=worker.pid, cause=worker.end_text(how))
            log.warning("worker ended", extra=fields)
        self._hooks.worker_gone(worker, how or Exit(None))

    # One start

    async def _launch(self, slot: Slot, worker: Worker) -> Worker:
        """The worker, or the template's own process where it cannot be forked.

        Raises:
            WorkersFailed: it did not come up.
        """
        with self._as_failure():
            if not self.blueprint.preload:
                await self._launcher.launch(worker, self.blueprint)
                return worker
            return await self._launch_preloaded(slot, worker)

    @contextlib.contextmanager
    def _as_failure(self) -> Iterator[None]:
        """Whatever goes wrong within is told to those who wait for a start: WorkersFailed."""
        try:
            yield
        except WorkersFailed:
            raise
        except OSError as error:
            raise WorkersFailed(f"the server cannot start a process: {error}") from error
        except Exception as error:
            log.exception("worker failed to start", extra={"model": self.blueprint.model_name})
            raise WorkersFailed("an internal error; the log has it") from error

    async def _launch_preloaded(self, slot: Slot, worker: Worker) -> Worker:
        for is_last in (False, True):
            mould = await self._ready_mould(slot, worker)
            template = mould.template
            if not template.can_fork:
                break
            # What its load has measured was told when the template loaded.
            worker.on_metrics = None
            try:
                with mould.forking():
                    await self._launcher.launch_from(template, worker, self.blueprint)
            except ConnectionError:  # it has died; there will be another
                if is_last:
                    raise WorkersFailed("the process that had it loaded died") from None
            else:
                worker.on_metrics = self._hooks.worker_metrics
                return worker
        if not template.was_given_away and template.worker.gpu_id == slot.gpu_id:
            template.was_given_away = True
            template.worker.id, template.worker.number = slot.id, slot.number
            return template.worker
        worker.start_reason = template.why_not
        await self._launcher.launch(worker, self.blueprint)
        return worker

    async def _ready_mould(self, slot: Slot, worker: Worker) -> _Mould:
        """The one template, for all who start a worker. Raises WorkersFailed."""
        worker.raise_if_aborted()
        mould = self._mould
        if mould is None or mould.is_spent:
            self.drop_template()
            mould = self._mould = _Mould(self._new_worker(slot))
            self._moulds.add(mould)
            mould.task = self._spawn(self._keep_mould(mould))
        await worker.unless_aborted(asyncio.shield(mould.made))
        if isinstance(failure := mould.made.result(), WorkersFailed):
            raise failure
        return mould

    async def _keep_mould(self, mould: _Mould) -> None:
        """Loads the model into a template, and stays until that is not needed, or has ended."""
        worker, template = mould.worker, None
        try:
            with self._as_failure():
                template = await self._launcher.launch_template(worker, self.blueprint)
        except WorkersFailed as failure:
            mould.made.set_result(failure)
        else:
            assert template is not None
            if not template.can_fork:
                worker.start_reason = template.why_not
                log.warning(
                    "the preloaded model cannot be forked; each worker loads for itself",
                    extra={"model": self.blueprint.model_name, "cause": template.why_not},
                )
            mould.made.set_result(template)
            await first_of(worker.ended, mould.dropped)
            await mould.without_forks()
            template.link.close()
        if self._mould is mould:
            self._mould = None
        if template is None or not template.was_given_away:
            await worker.stop()
        self._moulds.discard(mould)

    def _new_worker(self, slot: Slot) -> Worker:
        zygote, name = self._launcher.zygote, self.blueprint.model_name
        worker = Worker(zygote, name, slot.number, slot.id, slot.gpu_id)
        worker.on_metrics = self._hooks.worker_metrics
        return worker

    def _fields(self, slot: Slot, **more: object) -> dict[str, object]:
        return {"model": self.blueprint.model_name, "worker": slot.id, **more}


async def _drain(worker: Worker) -> None:
    """Lets its batches finish, then ends it."""
    worker.ask_to_stop()
    await worker.drained()
    await worker.stop()


def _cut(slots: Iterable[Slot]) -> None:
    """Ends workers that still have a batch; the others are ending."""
    for slot in slots:
        for worker in slot.workers():
            if worker.in_flight:
                worker.kill("It was stopped while it served.")


def _is_ready(slot: Slot) -> bool:
    return slot.worker is not None and slot.worker.state is State.READY


def _is_busy(slot: Slot) -> bool:
    return slot.worker is not None and slot.worker.in_flight > 0
