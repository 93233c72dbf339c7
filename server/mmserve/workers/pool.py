"""The workers of one model: as many as wanted, each started anew when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Protocol

import msgspec

from mmserve.errors import WorkersFailed
from mmserve.workers.blueprint import Blueprint
from mmserve.workers.launcher import Launcher, Template
from mmserve.workers.life import Restarts, State
from mmserve.workers.worker import Worker
from mmserve.workers.zygote import Exit

log = logging.getLogger("mmserve.workers")


class Hooks(Protocol):
    """Who gives the workers their work."""

    def worker_ready(self, worker: Worker) -> None: ...

    def worker_retired(self, worker: Worker) -> None:
        """It takes no new batch from now on."""

    def worker_gone(self, worker: Worker, how: Exit) -> None:
        """Its process is reaped; what it had will not be answered."""

    def workers_given_up(self, cause: WorkersFailed) -> None:
        """`max_worker_restarts` is reached."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """How long workers live.

    Attributes:
        max_restarts: in a row, before a worker is given up; None for no limit.
        max_requests: batches after which a worker is replaced; None for never.
        memory_limit: resident bytes above which a worker is replaced; None for never.
    """

    max_restarts: int | None = None
    max_requests: int | None = None
    memory_limit: int | None = None


class Slot:
    """One of the workers that are wanted, whichever process it is at the moment."""

    def __init__(self, port: int, number: int, gpu_id: int | None, started: str) -> None:
        self.id = f"{port}-{uuid.uuid4().hex[:8]}"
        self.number = number  # its place among the slots that the model had so far
        self.gpu_id = gpu_id
        self.started = started  # when it was asked for, as `describe` shows it
        self.worker: Worker | None = None
        self.is_wanted = True
        self.is_given_up = False
        self.failure: WorkersFailed | None = None
        self.wake = asyncio.Event()
        self.first_attempt: asyncio.Future[WorkersFailed | None] = (
            asyncio.get_running_loop().create_future()
        )
        self.task: asyncio.Task[None] | None = None

    def attempted(self, failure: WorkersFailed | None) -> None:
        self.failure = failure
        if not self.first_attempt.done():
            self.first_attempt.set_result(failure)

    @property
    def is_alive(self) -> bool:
        """Whether a worker serves, or is on its way for the first time or after a success."""
        return self.worker is not None and self.worker.state is not State.STOPPED


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
        self.blueprint, self._launcher, self._hooks, self._policy = (
            blueprint,
            launcher,
            hooks,
            policy,
        )
        self._spawn, self._assign_gpu, self._now_text, self._port = (
            spawn,
            assign_gpu,
            now_text,
            port,
        )
        self._numbers = itertools.count(1)
        self.slots: list[Slot] = []
        self.leaving: set[Slot] = set()
        self._template: Template | None = None
        self._template_lock = asyncio.Lock()

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

    def pick_leaving(self, count: int) -> list[Slot]:
        """Takes `count` workers out: those that serve nobody yet first, then the newest."""
        order = sorted(
            range(len(self.slots)),
            key=lambda i: (_is_ready(self.slots[i]), _is_busy(self.slots[i]), -i),
        )
        chosen = [self.slots[i] for i in order[:count]]
        self.slots = [slot for slot in self.slots if slot not in chosen]
        self.leaving.update(chosen)
        for slot in chosen:
            slot.is_wanted = False
            slot.wake.set()
            if slot.worker is not None and slot.worker.state is State.READY:
                slot.worker.ask_to_stop()
                self._hooks.worker_retired(slot.worker)
        return chosen

    async def leave(self, slots: list[Slot], *, timeout_s: float) -> None:
        """Stops workers taken out by `pick_leaving`: what runs may finish within the timeout."""
        await asyncio.gather(*(self._leave(slot, timeout_s) for slot in slots))

    async def close(self, *, timeout_s: float) -> None:
        """Stops them all, the template too. Returns when their processes are reaped."""
        await self.leave(self.pick_leaving(len(self.slots)), timeout_s=timeout_s)
        await self.drop_template()

    async def drop_template(self) -> None:
        template, self._template = self._template, None
        if template is not None:
            template.link.close()
            if not template.was_given_away:
                await template.worker.stop(self._launcher.zygote)

    async def _leave(self, slot: Slot, timeout_s: float) -> None:
        worker = slot.worker
        if worker is not None and worker.state is State.DRAINING and worker.life.was_ready:
            try:
                async with asyncio.timeout(timeout_s):
                    await worker.idle()
            except TimeoutError:
                await worker.kill(self._launcher.zygote, "It was stopped while it served.")
            else:
                await worker.stop(self._launcher.zygote)
        elif worker is not None and worker.process is not None:
            await worker.kill(self._launcher.zygote)
        elif slot.task is not None:
            slot.task.cancel()  # a process born meanwhile finds its wire closed, and ends
        if slot.task is not None:
            await asyncio.wait({slot.task})
        self.leaving.discard(slot)

    # One slot

    async def _keep(self, slot: Slot) -> None:
        try:
            await self._keep_while_wanted(slot)
        finally:
            slot.attempted(slot.failure or WorkersFailed("it was stopped"))

    async def _keep_while_wanted(self, slot: Slot) -> None:
        restarts = Restarts(self._policy.max_restarts)
        while slot.is_wanted:
            batches, ready_s = await self._live_once(slot)
            if not slot.is_wanted:
                break
            pause_s = restarts.pause_s(batches=batches, ready_s=ready_s)
            if pause_s is None:
                slot.is_given_up = True
                failure = slot.failure or WorkersFailed("it kept ending")
                log.error("worker given up", extra=self._fields(slot, cause=failure.cause))
                self._hooks.workers_given_up(failure)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await slot.wake.wait()

    async def _live_once(self, slot: Slot) -> tuple[int, float]:
        """One process from its start to its end. (batches served, seconds it was ready)"""
        worker = slot.worker = self._new_worker(slot)
        try:
            worker = slot.worker = await self._launch(slot, worker)
        except WorkersFailed as failure:
            await worker.stop(self._launcher.zygote, grace_s=0)
            if slot.is_wanted:
                log.warning("worker failed to start", extra=self._fields(slot, cause=failure.cause))
            slot.attempted(failure)
            return 0, 0.0
        except Exception:
            log.exception("worker failed to start", extra=self._fields(slot))
            await worker.stop(self._launcher.zygote, grace_s=0)
            slot.attempted(WorkersFailed("an internal error; the log has it"))
            return 0, 0.0
        if worker.state is State.READY:
            self._announce(slot, worker)
        return await self._until_end(slot, worker)

    async def _until_end(self, slot: Slot, worker: Worker) -> tuple[int, float]:
        zygote = self._launcher.zygote
        while True:
            ended = asyncio.ensure_future(worker.ended(zygote))
            outgrown = asyncio.ensure_future(worker.outgrown.wait())
            await asyncio.wait({ended, outgrown}, return_when=asyncio.FIRST_COMPLETED)
            outgrown.cancel()
            if ended.done():
                how = ended.result()
                break
            successor = await self._succeed(slot, worker)
            if successor is None:
                how = await ended
                break
            ended.cancel()
            worker = successor
        if slot.is_wanted:
            log.warning(
                "worker ended", extra=self._fields(slot, pid=worker.pid, cause=worker.end_text(how))
            )
        self._hooks.worker_gone(worker, how)
        return worker.batches, time.monotonic() - worker.ready_at

    async def _succeed(self, slot: Slot, old: Worker) -> Worker | None:
        """Replaces a worker that has served or grown enough. None: the old one stays."""
        old.outgrown.clear()
        new = self._new_worker(slot)
        try:
            new = await self._launch(slot, new)
        except WorkersFailed as failure:
            await new.stop(self._launcher.zygote, grace_s=0)
            log.warning("no successor for a worker", extra=self._fields(slot, cause=failure.cause))
            return None
        if not slot.is_wanted:  # it was stopped meanwhile, and with it the old one
            await new.stop(self._launcher.zygote)
            return None
        slot.worker = new
        self._announce(slot, new)
        if old.state is State.READY:
            old.ask_to_stop()
            self._hooks.worker_retired(old)
        await old.idle()
        await old.stop(self._launcher.zygote)
        assert old.process is not None
        self._hooks.worker_gone(old, old.process.exited.result())
        return new

    def _announce(self, slot: Slot, worker: Worker) -> None:
        worker.set_limits(self._policy.max_requests, self._policy.memory_limit)
        fields = self._fields(slot, pid=worker.pid, load_s=round(worker.load_s, 3))
        fields["start"] = worker.start
        if worker.start_reason:
            fields["reason"] = worker.start_reason
        log.info("worker ready", extra=fields)
        if slot.is_wanted:
            self._hooks.worker_ready(worker)
        slot.attempted(None)

    async def _launch(self, slot: Slot, worker: Worker) -> Worker:
        """The worker, or the template's own process where it cannot be forked."""
        if not self.blueprint.preload:
            await self._launcher.launch(worker, self.blueprint)
            return worker
        while True:
            template = await self._ready_template(slot)
            if template.can_fork:
                try:
                    await self._launcher.launch_from(template, worker, self.blueprint)
                    return worker
                except ConnectionError:
                    continue
            if not template.was_given_away:
                template.was_given_away = True
                return template.worker
            worker.start_reason = template.why_not
            await self._launcher.launch(worker, self.blueprint)
            return worker

    async def _ready_template(self, slot: Slot) -> Template:
        async with self._template_lock:
            if self._template is None or self._template.link.is_closed:
                worker = self._new_worker(slot)
                try:
                    self._template = await self._launcher.launch_template(worker, self.blueprint)
                except BaseException:  # cancelled, too: its process may be there
                    self._spawn(worker.stop(self._launcher.zygote, grace_s=0))
                    raise
                if not self._template.can_fork:
                    worker.start_reason = self._template.why_not
                    log.warning(
                        "the preloaded model cannot be forked; each worker loads for itself",
                        extra=self._fields(slot, cause=self._template.why_not),
                    )
            return self._template

    def _new_worker(self, slot: Slot) -> Worker:
        return Worker(self.blueprint.model_name, slot.number, slot.id, slot.gpu_id)

    def _fields(self, slot: Slot, **more: object) -> dict[str, object]:
        return {"model": self.blueprint.model_name, "worker": slot.id, **more}


def _is_ready(slot: Slot) -> bool:
    return slot.worker is not None and slot.worker.state is State.READY


def _is_busy(slot: Slot) -> bool:
    return slot.worker is not None and slot.worker.in_flight > 0
