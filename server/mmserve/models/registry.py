"""Every model of the server: its registration, its workers, its queue. Implements `port.Models`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from mmserve.config.report import mask_urls
from mmserve.config.settings import Settings
from mmserve.errors import (
    InvalidModel,
    ModelExists,
    ModelNotFound,
    NoWorker,
    ServeError,
    ShuttingDown,
    UnregisterTimedOut,
    WorkersFailed,
)
from mmserve.models.fetching import Fetched, Fetcher
from mmserve.models.manifest import default_model_name
from mmserve.models.port import ModelDescription, Progress, Registration, WorkerDescription
from mmserve.scheduling.batcher import Batcher
from mmserve.scheduling.busy_poll import BusyPoll
from mmserve.scheduling.dispatcher import Dispatcher
from mmserve.scheduling.job import Job
from mmserve.workers.blueprint import Blueprint
from mmserve.workers.exits import Exit
from mmserve.workers.launcher import Launcher
from mmserve.workers.life import State
from mmserve.workers.pool import Policy, Pool, Slot
from mmserve.workers.worker import Worker, first_of

log = logging.getLogger("mmserve.models")

DEFAULT_BATCH_DELAY_MS = 100
_SHORTEST_WAIT_S = 0.001  # a request that a free worker takes at once never waits so long
_FIRST_PORT = 9000  # worker ids begin with it, as Multi Model Server's do; nothing listens there
#: Read by `mmserve_handlers`: where weights lie that were cast once for all workers.
PREPARED_DIR = "MMSERVE_PREPARED_DIR"
#: Seconds a killed process may take to be reaped before unregistering gives up on it.
REAP_LIMIT_S = 10.0

Spawn = Callable[[Coroutine[object, object, None]], asyncio.Task[None]]


class Model:
    """One registered model.

    Attributes:
        failure: why its workers were given up, where `max_worker_restarts` is reached.
        removal: ends its processes and gives its archive back, once it is unregistered.
    """

    def __init__(
        self,
        name: str,
        asked: Registration,
        fetched: Fetched,
        *,
        is_startup: bool,
    ) -> None:
        self.name, self.asked, self.fetched, self.is_startup = name, asked, fetched, is_startup
        self.min_workers = self.max_workers = 0
        self.failure: WorkersFailed | None = None
        self.removal: asyncio.Task[None] | None = None
        self.pool: Pool
        self.dispatcher: Dispatcher

    def refuse_without_workers(self) -> None:
        """A model of no workers, or none of whose workers starts, takes no job.

        Who asks learns the cause at once; a worker that comes up later ends the refusal.
        """
        if self.removal is not None or isinstance(self.dispatcher.refusal, ShuttingDown):
            return  # which is the last word
        why: ServeError | None = None
        if not self.pool.slots and self.failure is None:
            why = NoWorker(self.name)
        elif (failure := self.last_failure) is not None:
            why = NoWorker(self.name, f"Its workers do not start: {failure.cause}")
        self.dispatcher.refuse(why)

    @property
    def last_failure(self) -> WorkersFailed | None:
        """Why none of its workers starts; None where one has, or may."""
        if self.failure is not None:
            return self.failure
        failures = [slot.failure for slot in self.pool.slots]
        return failures[-1] if failures and None not in failures else None


class Registry:
    """The house that keeps the models.

    Args:
        fetcher: brings archives.
        launcher: starts workers.
        spawn: starts a task that somebody owns.
        environ: environment of the server, from which that of workers is made.
        gpus: devices to hand out in turn.
        on_metrics: gets finished metric lines of workers.
        on_ready: told of each worker that is ready, with its model's name.
        reap_limit_s: how long a killed process may take to be reaped.
    """

    def __init__(
        self,
        settings: Settings,
        fetcher: Fetcher,
        launcher: Launcher,
        *,
        spawn: Spawn,
        environ: Mapping[str, str],
        gpus: int,
        startup_workers: int,
        on_metrics: Callable[[list[str]], None],
        on_ready: Callable[[str, Worker], None],
        reap_limit_s: float = REAP_LIMIT_S,
    ) -> None:
        self._settings, self._fetcher, self._launcher = settings, fetcher, launcher
        self._spawn, self._gpus = spawn, gpus
        self._startup_workers = startup_workers
        self.on_metrics, self._on_ready = on_metrics, on_ready
        self._reap_limit_s = reap_limit_s
        self._environ = worker_environment(environ, settings)
        self._models: dict[str, Model] = {}
        self._missing: list[tuple[str, str]] = []  # (name, url) of the start, not registered
        self._leaving: set[Model] = set()  # unregistered, and not yet gone
        self._gpu_turn = 0
        self._ports = itertools.count(_FIRST_PORT)
        self._is_stopping = False
        self._busy_poll = BusyPoll(settings.busy_poll_s)
        self._policy = Policy(
            max_restarts=settings.max_worker_restarts,
            max_requests=settings.worker_max_requests,
            memory_limit=settings.worker_memory_limit,
        )

    # Jobs

    def submit(self, name: str, job: Job) -> None:
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(name)
        model.dispatcher.submit(job)

    def has(self, name: str) -> bool:
        return name in self._models

    # Registering

    async def register(self, asked: Registration) -> tuple[str, Progress]:
        name, progress = await self._enter(asked, await self._fetch(asked), is_startup=False)
        self._settle_missing(name, asked.url)  # by its url: we may have guessed another name
        return name, progress

    async def register_at_start(
        self, entries: Sequence[tuple[str | None, str]]
    ) -> list[tuple[str, ServeError]]:
        """Registers the models that are loaded at start; their workers come up meanwhile.

        Archives are fetched together. Of two with one name the first in the list wins, however
        long it takes.

        Args:
            entries: (name where the list gives one, url) of each.

        Returns:
            (name or url, why) of each that was not registered, in their order.
        """
        names = [name for name, _ in entries]  # None until it is known
        entered: list[asyncio.Task[ServeError | None]] = []

        async def enter(at: int, asked: Registration) -> ServeError | None:
            try:
                fetched = await self._fetch(asked, default_model_name(asked.url))
                names[at] = fetched.name
                rivals = [entered[i] for i in range(at) if names[i] in (None, fetched.name)]
                if rivals:
                    try:
                        await asyncio.wait(rivals)
                    except BaseException:
                        fetched.lease.release()
                        raise
                await self._enter(asked, fetched, is_startup=True)
            except ServeError as error:
                return error
            return None

        async with asyncio.TaskGroup() as tasks:
            for at, (name, url) in enumerate(entries):
                asked = Registration(url=url, model_name=name, synchronous=False)
                entered.append(tasks.create_task(enter(at, asked)))
        outcomes = [task.result() for task in entered]
        for (_, url), name, error in zip(entries, names, outcomes, strict=True):
            if error is not None and (name is None or name not in self._models):
                self.miss(name, url)
        return [
            (name or url, error)
            for (name, url), error in zip(entries, outcomes, strict=True)
            if error is not None
        ]

    def miss(self, name: str | None, url: str) -> None:
        """A model of the start could not be registered."""
        self._missing.append((name or default_model_name(url) or url, url))

    def missing_at_start(self) -> list[str]:
        return [name for name, _ in self._missing]

    def _settle_missing(self, name: str, url: str | None = None) -> bool:
        """A missing model was registered, or given up. False where none was missing."""
        missing = [each for each in self._missing if each[0] != name and each[1] != url]
        was_missing = len(missing) < len(self._missing)
        self._missing = missing
        return was_missing

    async def _fetch(self, asked: Registration, default_name: str | None = None) -> Fetched:
        """Brings the archive. Raises ServeError."""
        if self._is_stopping:
            raise ShuttingDown
        return await self._fetcher.fetch(
            asked.url,
            model_name=asked.model_name,
            handler=asked.handler,
            runtime=asked.runtime,
            default_name=default_name,
        )

    async def _enter(
        self, asked: Registration, fetched: Fetched, *, is_startup: bool
    ) -> tuple[str, Progress]:
        """Takes the name and starts the workers. Raises ServeError."""
        settings = self._settings
        workers = asked.initial_workers
        if workers is None:
            workers = self._startup_workers if is_startup else settings.default_workers_per_model
        try:
            model = self._admit(asked, fetched, is_startup=is_startup)
        except BaseException:
            await fetched.lease.release()
            raise
        name, workers = model.name, max(0, workers)
        if not workers:
            log.info("model registered", extra={"model": name, "url": mask_urls(asked.url)})
            return name, Progress.REGISTERED
        slots = self._resize(model, workers, workers)
        if not asked.synchronous:
            return name, Progress.STARTED
        failed = await first_failed(slots)
        if failed is None:
            log.info(
                "model loaded",
                extra={"model": name, "url": mask_urls(asked.url), "workers": workers},
            )
            return name, Progress.DONE
        if model.removal is None and not failed.is_wanted:
            return name, Progress.PARTIAL  # somebody scaled it down meanwhile
        await asyncio.wait({self._remove(model, timeout_s=0)}, timeout=self._reap_limit_s)
        raise failed.failure or WorkersFailed()

    def _admit(self, asked: Registration, fetched: Fetched, *, is_startup: bool) -> Model:
        """Takes the name. Raises ModelExists, InvalidModel, ShuttingDown."""
        settings, name = self._settings, fetched.name
        if self._is_stopping:
            raise ShuttingDown
        if name in self._models:
            raise ModelExists(name)
        if fetched.runtime == "python2":
            raise InvalidModel("runtime python2 is not supported: handlers run on Python 3.")
        model = Model(name, asked, fetched, is_startup=is_startup)
        timeout_s, wait_s = self._limits_s(asked)
        preload = settings.preload_model if asked.preload_model is None else asked.preload_model
        blueprint = Blueprint(
            model_name=name,
            model_dir=fetched.directory,
            handler=fetched.handler,
            manifest=fetched.manifest_text,
            batch_size=max(1, asked.batch_size),
            decode_input=settings.decode_input_request,
            max_response_size=settings.max_response_size,
            environ=_with_prepared_dir(self._environ, fetched.prepared_dir),
            top_names=fetched.top_names,
            names_libraries=fetched.names_libraries,
            preload=preload,
            busy_poll_s=settings.busy_poll_s,
        )
        batcher = Batcher(
            name,
            settings.job_queue_size,
            asked.batch_size,
            self._batch_delay_s(asked),
            wait_s,
        )
        model.dispatcher = Dispatcher(
            name, batcher, response_timeout_s=timeout_s, busy_poll=self._busy_poll
        )
        model.pool = Pool(
            blueprint,
            self._launcher,
            _Workers(self, model),
            self._policy,
            spawn=self._spawn,
            assign_gpu=self._next_gpu,
            now_text=_now_text,
            port=next(self._ports),
        )
        model.refuse_without_workers()
        self._models[name] = model
        return model

    def _limits_s(self, asked: Registration) -> tuple[float, float]:
        """How long a prediction may take, and a request may wait for one."""
        settings = self._settings
        if settings.debug:
            return math.inf, math.inf
        timeout_s = asked.response_timeout_s
        if timeout_s is None or timeout_s < 0:
            timeout_s = settings.response_timeout_s
        wait_s = settings.max_queue_wait_seconds
        return timeout_s, max(timeout_s if wait_s is None else wait_s, _SHORTEST_WAIT_S)

    def _batch_delay_s(self, asked: Registration) -> float:
        """`fill` waits as Multi Model Server does, `immediate` takes what is there; `auto` fills
        where the registration names a delay."""
        policy = self._settings.batch_policy
        delay_ms = asked.max_batch_delay_ms
        if policy == "immediate" or (policy == "auto" and delay_ms is None):
            return 0.0
        return max(0, DEFAULT_BATCH_DELAY_MS if delay_ms is None else delay_ms) / 1000

    def _next_gpu(self) -> int | None:
        if not self._gpus:
            return None
        self._gpu_turn = (self._gpu_turn + 1) % self._gpus
        return self._gpu_turn

    # Scaling

    async def scale(
        self, name: str, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Progress:
        model = self._find(name)
        if self._is_stopping:
            raise ShuttingDown
        slots = self._resize(model, min_workers, max_workers)
        if not synchronous:
            return Progress.STARTED
        leaving = [slot.task for slot in model.pool.leaving]
        if leaving:
            await asyncio.wait(leaving)
        waiting = slots or [slot for slot in model.pool.slots if not slot.first_attempt.done()]
        failed = await first_failed(waiting)
        if model.removal is not None:
            raise ModelNotFound(name)
        if failed is None:
            return Progress.DONE
        if not failed.is_wanted:
            return Progress.PARTIAL  # another call changed its mind meanwhile
        raise failed.failure or WorkersFailed()

    def _resize(self, model: Model, low: int, high: int) -> list[Slot]:
        """Starts or stops workers. The new ones."""
        if self._settings.debug:
            low, high = min(low, 1), min(high, 1)
        model.min_workers, model.max_workers = low, high
        model.failure = None
        pool, slots = model.pool, []
        pool.forget_given_up()
        now = len(pool.slots)
        wanted = 0 if low == 0 else min(max(now, low), high)
        if wanted > now:
            slots = pool.grow(wanted - now)
        elif wanted < now:
            leaving = pool.pick_leaving(now - wanted)
            timeout_s = self._settings.unregister_model_timeout
            self._spawn(pool.leave(leaving, timeout_s=timeout_s))
        if not wanted:
            pool.drop_template()
        model.refuse_without_workers()
        return slots

    # Unregistering

    async def unregister(self, name: str) -> None:
        if name not in self._models and self._settle_missing(name):
            log.info("missing model given up", extra={"model": name})
            return
        model = self._find(name)
        timeout_s = self._settings.unregister_model_timeout
        removal = self._remove(model, timeout_s=timeout_s)
        await asyncio.wait({removal}, timeout=timeout_s + self._reap_limit_s)
        if not removal.done():
            model.dispatcher.close()
            raise UnregisterTimedOut(name)
        log.info("model unregistered", extra={"model": name})

    def _remove(self, model: Model, *, timeout_s: float) -> asyncio.Task[None]:
        """Frees the name at once. Done when the processes are reaped."""
        if model.removal is None:
            del self._models[model.name]
            self._leaving.add(model)
            model.dispatcher.forget_queue()
            model.removal = self._spawn(self._see_off(model, timeout_s))
        return model.removal

    async def _see_off(self, model: Model, timeout_s: float) -> None:
        try:
            await model.pool.close(timeout_s=timeout_s)
        finally:
            model.dispatcher.close()
            self._leaving.discard(model)
            await model.fetched.lease.release()

    # Asking

    def names(self) -> list[tuple[str, str]]:
        return [(name, self._models[name].asked.url) for name in sorted(self._models)]

    def describe(self, name: str) -> ModelDescription:
        model = self._find(name)
        asked, fetched = model.asked, model.fetched
        delay_ms = asked.max_batch_delay_ms
        return ModelDescription(
            modelName=name,
            modelVersion=fetched.version or msgspec.UNSET,
            modelUrl=asked.url,
            engine=fetched.engine or msgspec.UNSET,
            runtime=fetched.runtime,
            minWorkers=model.min_workers,
            maxWorkers=model.max_workers,
            batchSize=asked.batch_size,
            maxBatchDelay=DEFAULT_BATCH_DELAY_MS if delay_ms is None else delay_ms,
            loadedAtStartup=model.is_startup,
            workers=[_describe(slot) for slot in model.pool.slots if not slot.is_given_up],
            state="FAILED" if model.failure is not None else msgspec.UNSET,
            cause=cause.cause if (cause := model.last_failure) is not None else msgspec.UNSET,
        )

    def health(self) -> str:
        wanted = sum(model.min_workers for model in self._models.values())
        alive = sum(slot.is_alive for model in self._models.values() for slot in model.pool.slots)
        if wanted == 0 or alive >= wanted:
            return "Healthy"
        return "Partial Healthy" if alive else "Unhealthy"

    def sole_startup_model(self) -> str | None:
        names = [name for name, model in self._models.items() if model.is_startup]
        return names[0] if len(names) == 1 else None

    def _find(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(name)
        return model

    # Workers of a model

    def worker_ready(self, model: Model, worker: Worker) -> None:
        self._on_ready(model.name, worker)
        model.refuse_without_workers()
        model.dispatcher.worker_ready(worker)

    def workers_given_up(self, model: Model, cause: WorkersFailed) -> None:
        if all(slot.is_given_up for slot in model.pool.slots):
            model.failure = cause
            model.refuse_without_workers()

    async def failed_to_start(self) -> list[str]:
        """Waits until the workers of every start-up model have tried to start. Who failed."""
        models = [model for model in self._models.values() if model.is_startup]
        failed = await asyncio.gather(*(first_failed(model.pool.slots) for model in models))
        return [model.name for model, slot in zip(models, failed, strict=True) if slot is not None]

    # The end

    async def close(self, *, timeout_s: float) -> None:
        """Lets what runs and waits finish within the timeout, then ends all workers.

        It may be cancelled and called again with less time.
        """
        self._is_stopping = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s

        def left_s() -> float:
            return max(0.0, deadline - loop.time())

        await asyncio.gather(*(self._finish(model, left_s()) for model in self._models.values()))
        for model in list(self._models.values()):
            self._remove(model, timeout_s=left_s())
        removals = {model.removal for model in self._leaving if model.removal is not None}
        if not removals:
            return
        _, late = await asyncio.wait(removals, timeout=left_s())
        if late:  # unregistered before, with more time than there is now
            for model in self._leaving:
                model.pool.cut()
            await asyncio.wait(late, timeout=self._reap_limit_s)

    async def _finish(self, model: Model, timeout_s: float) -> None:
        """Returns when the model has no work, or takes none any more."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await model.dispatcher.without_work()
        model.dispatcher.refuse(ShuttingDown())


class _Workers:
    """Ties a pool to the dispatcher of its model."""

    def __init__(self, registry: Registry, model: Model) -> None:
        self._registry, self._model = registry, model
        self.worker_metrics = registry.on_metrics

    def worker_ready(self, worker: Worker) -> None:
        self._registry.worker_ready(self._model, worker)

    def worker_retired(self, worker: Worker) -> None:
        self._model.dispatcher.worker_retired(worker)

    def worker_gone(self, worker: Worker, how: Exit) -> None:
        self._model.dispatcher.worker_gone(worker, how)

    def worker_failed(self) -> None:
        self._model.refuse_without_workers()

    def workers_given_up(self, cause: WorkersFailed) -> None:
        self._registry.workers_given_up(self._model, cause)


async def first_failed(slots: Sequence[Slot]) -> Slot | None:
    """Waits until each slot has tried to start once, or one has failed: that one."""
    pending = set(slots)
    while True:
        for slot in [slot for slot in pending if slot.first_attempt.done()]:
            pending.discard(slot)
            if slot.first_attempt.result() is not None:
                return slot
        if not pending:
            return None
        await first_of(*(slot.first_attempt for slot in pending))


def worker_environment(environ: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The server's environment without what `blacklist_env_vars` names, plus what workers read."""
    hidden = re.compile(settings.blacklist_env_vars) if settings.blacklist_env_vars else None
    kept = {k: v for k, v in environ.items() if hidden is None or not hidden.fullmatch(k)}
    kept["MMS_DECODE_INPUT_REQUEST"] = "true" if settings.decode_input_request else "false"
    return kept


def _with_prepared_dir(environ: Mapping[str, str], folder: str) -> Mapping[str, str]:
    """Names the folder for prepared weights, unless the environment names one of its own."""
    return {PREPARED_DIR: folder, **environ} if folder else environ


def _describe(slot: Slot) -> WorkerDescription:
    worker = slot.worker
    if worker is None:
        return WorkerDescription(
            id=slot.id,
            startTime=slot.started,
            status="LOADING",
            gpu=slot.gpu_id is not None,
            memoryUsage=0,
        )
    return WorkerDescription(
        id=slot.id,
        startTime=slot.started,
        status=_STATUS[worker.state],
        gpu=slot.gpu_id is not None,
        memoryUsage=worker.memory_bytes,
        pid=worker.pid,
        start=worker.start,
        startReason=worker.start_reason or None,
    )


#: The descriptor's enum has READY, LOADING and UNLOADING; a worker that failed will load again.
_STATUS: Mapping[State, str] = {
    State.STARTING: "LOADING",
    State.LOADING: "LOADING",
    State.READY: "READY",
    State.DRAINING: "UNLOADING",
    State.STOPPED: "LOADING",
}


def _now_text() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
