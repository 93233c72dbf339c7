"""A registry with all below it real: zygote, pools, dispatchers, processes. Only the archives are
folders that the test has written."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from mmserve import platform
from mmserve.config.settings import Settings
from mmserve.errors import ServeError, SourceNotFound
from mmserve.models.fetching import Fetched
from mmserve.models.manifest import Manifest
from mmserve.models.port import Progress, Registration
from mmserve.models.registry import REAP_LIMIT_S, Model, Registry
from mmserve.scheduling.dispatcher import Dispatcher
from mmserve.scheduling.job import Deliver, Job, Result
from mmserve.wire.messages import Parameter
from mmserve.workers.launcher import Launcher
from mmserve.workers.pool import Pool, Slot
from mmserve.workers.worker import Worker
from mmserve.workers.zygote import Zygote
from tests.workers.house import until, write_model

Outcome = Result | ServeError

#: What the test's models do, by the first word of a request.
PREDICT = """
    word, _, rest = body.partition(' ')
    if word == 'sleep':
        print('begun', body)
        time.sleep(float(rest))
    if word == 'crash':
        os.kill(os.getpid(), signal.SIGKILL)
    if word == 'raise':
        raise ValueError(rest)
    return str(os.getpid())
"""


class FolderFetcher:
    """Brings folders below a store as they are, and counts who uses them.

    A url in `held` is not brought before its event is set.
    """

    def __init__(self, store: Path) -> None:
        self.store = store
        self.in_use = 0
        self.held: dict[str, asyncio.Event] = {}

    async def fetch(
        self,
        url: str,
        *,
        model_name: str | None = None,
        handler: str | None = None,
        runtime: str | None = None,
        default_name: str | None = None,
    ) -> Fetched:
        await asyncio.sleep(0)  # it always takes a turn
        if url in self.held:
            await self.held[url].wait()
        directory = self.store / url
        if not directory.is_dir():
            raise SourceNotFound(f"Model not found in model store: {url}")
        self.in_use += 1
        return Fetched(
            directory=str(directory),
            name=model_name or url.partition("/")[2] or default_name or url,
            handler=handler or "service:handle",
            runtime=runtime or "python",
            version=None,
            engine=None,
            manifest=Manifest(),
            manifest_text="",
            digest=None,
            size_bytes=None,
            top_names=["service"],
            code_names=[],
            names_libraries=False,
            lease=_Lease(self),  # type: ignore[arg-type] # a working one
        )


class _Lease:
    def __init__(self, fetcher: FolderFetcher) -> None:
        self._fetcher, self._is_released = fetcher, False

    def release(self, *, keep: bool = True) -> asyncio.Future[None]:
        if not self._is_released:
            self._is_released = True
            self._fetcher.in_use -= 1
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Hall:
    """A registry and what a test needs to know of it.

    Attributes:
        failures: exceptions of tasks that nobody awaits; must stay empty.
        lines: what the workers printed.
    """

    def __init__(self, zygote: Zygote, place: Path, settings: Settings, **options: Any) -> None:
        self.zygote = zygote
        self.strangers: frozenset[int] = frozenset()  # what other tests have left to us
        self.fetcher = FolderFetcher(place)
        self.tasks: set[asyncio.Task[None]] = set()
        self.failures: list[BaseException] = []
        self.lines: list[str] = []
        self.metrics: list[str] = []
        launcher = Launcher(
            zygote,
            lambda worker, stream, said: self.lines.extend(line.text for line in said),
            worker_start=settings.worker_start,
            load_timeout_s=settings.load_timeout_s,
            max_processes=settings.max_worker_processes,
        )
        self.registry = Registry(
            settings,
            self.fetcher,  # type: ignore[arg-type] # a working one
            launcher,
            spawn=self.spawn,
            environ=os.environ,
            startup_workers=1,
            on_metrics=self.metrics.extend,
            on_ready=lambda model, worker: None,
            **options,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.failures.append(error)

        task = asyncio.get_running_loop().create_task(guarded())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def write(self, url: str, predict: str = PREDICT, *, load: str = "pass", **more: str) -> str:
        """A model's folder; its url."""
        write_model(self.fetcher.store / url, predict, load=load, **more)
        return url

    # Asking

    async def register(
        self, url: str, workers: int = 1, *, synchronous: bool = True, **more: Any
    ) -> Progress:
        asked = Registration(url=url, initial_workers=workers, synchronous=synchronous, **more)
        _, progress = await self.registry.register(asked)
        return progress

    async def scale(
        self, name: str, low: int, high: int | None = None, *, synchronous: bool = True
    ) -> Progress:
        high = low if high is None else high
        return await self.registry.scale(
            name, min_workers=low, max_workers=high, synchronous=synchronous
        )

    def ask(self, name: str, body: str = "") -> asyncio.Future[Outcome]:
        """Submits a request; the future is its one outcome. Raises what `submit` raises."""
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def deliver(result: Outcome) -> None:
            if outcome.done():
                self.failures.append(AssertionError(f"a second outcome: {result!r}"))
            else:
                outcome.set_result(result)

        self.submit(name, body, deliver)
        return outcome

    def submit(self, name: str, body: str, deliver: Deliver = lambda _: None) -> Job:
        value = body.encode()
        parameters: list[tuple[Parameter, bytes | memoryview]] = [
            (Parameter("body", len(value), "text/plain"), value)
        ]
        job = Job("id", [], parameters, deliver)
        self.registry.submit(name, job)
        return job

    async def begin(self, name: str, body: str) -> asyncio.Future[Outcome]:
        """Asks for something that its handler prints, and waits for that."""
        before = len(self.lines)
        outcome = self.ask(name, body)
        await until(lambda: any("begun" in line for line in self.lines[before:]) or outcome.done())
        return outcome

    async def pid(self, name: str) -> int:
        """Of the worker that answers."""
        outcome = await self.ask(name)
        assert isinstance(outcome, Result), outcome
        return int(bytes(outcome.body))

    def model(self, name: str) -> Model:
        return self.registry._models[name]

    def slots(self, name: str) -> list[Slot]:
        return self.model(name).pool.slots

    def workers(self) -> list[int]:
        """Processes below the zygote: workers, templates, the library and what they started."""
        below = platform.descendants(os.getpid())
        return [pid for pid in below if pid != self.zygote.pid and pid not in self.strangers]

    # Leaving nothing

    async def empty(self) -> None:
        """Unregisters everything, and finds nothing left of it."""
        for name, _ in self.registry.names():
            with contextlib.suppress(ServeError):
                await self.registry.unregister(name)
        await self.is_empty()

    async def is_empty(self, *, at_once: bool = True) -> None:
        """Args:
        at_once: no process is left. Otherwise one may be whose parent was killed as it was born:
            nobody knows of it, and it ends on its own when it finds nobody to talk to.
        """
        assert self.registry.names() == []
        await until(lambda: not self.tasks, limit_s=15)
        assert self.fetcher.in_use == 0

        def is_alone() -> bool:
            return set(self.workers()) <= {self.zygote.library.pid}

        if not at_once:
            await until(is_alone)
        assert is_alone()
        assert self.failures == []

    async def close(self) -> None:
        await self.registry.close(timeout_s=0)
        while self.tasks:
            await asyncio.wait(self.tasks)


def remembered() -> list[object]:
    """What belongs to a model and is still held by something."""
    gc.collect()
    kinds = (Model, Pool, Slot, Worker, Dispatcher)
    # By type: `isinstance` asks objects of others for their `__class__`, and some of torch's warn.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


@contextlib.asynccontextmanager
async def open_hall(
    place: Path,
    *,
    imports: Sequence[str] = (),
    gpus: int = 0,
    reap_limit_s: float = REAP_LIMIT_S,
    **settings: Any,
) -> AsyncIterator[Hall]:
    """More keyword arguments are settings."""
    strangers = frozenset(platform.descendants(os.getpid()))
    zygote = Zygote(imports, os.environ, library_delay_s=0)
    async with zygote.running():
        defaults = {"default_response_timeout_seconds": 20, "unregister_model_timeout": 10}
        every = Settings(**(defaults | settings))
        hall = Hall(zygote, place, every, gpus=gpus, reap_limit_s=reap_limit_s)
        hall.strangers = strangers
        try:
            yield hall
        finally:
            await hall.close()
    assert hall.failures == []
