"""A house of models that lives in memory: the `Models` protocol without a process or a file."""

from __future__ import annotations

from collections.abc import Callable

from mmserve.errors import (
    ModelExists,
    ModelNotFound,
    NoWorker,
    QueueFull,
    ServeError,
    SourceNotFound,
    UnregisterTimedOut,
    WorkersFailed,
)
from mmserve.models.port import (
    ModelDescription,
    Models,
    Progress,
    Registration,
    WorkerDescription,
)
from mmserve.scheduling.job import Job, Result

Handler = Callable[[Job], Result | ServeError]


def says_ok(job: Job) -> Result:
    return Result(200, None, [], b"ok")


class FakeModel:
    """One registered model. While `is_paused`, its jobs wait, `capacity` of them at most."""

    def __init__(self, name: str, asked: Registration, workers: int) -> None:
        self.name, self.asked = name, asked
        self.least = self.most = workers
        self.handler: Handler = says_ok
        self.is_paused = self.is_loading = False
        self.capacity = 2
        self.waiting: list[Job] = []
        self.seen: list[Job] = []

    def run(self, job: Job) -> None:
        self.seen.append(job)
        job.deliver(self.handler(job))

    def go_on(self) -> None:
        """Runs what waits, but for jobs whose clients have left."""
        self.is_paused = False
        waiting, self.waiting = self.waiting, []
        for job in waiting:
            if not job.is_cancelled:
                self.run(job)


class FakeModels(Models):
    """Archives are named by their `url`: `x.mar` holds the model `x`; `absent…` is not there, and
    workers of `broken…` do not start. What `slow…` is asked to do is only partly done in time."""

    def __init__(self, *, default_workers: int = 0) -> None:
        self.models: dict[str, FakeModel] = {}
        self.default_workers = default_workers
        self.startup: list[str] = []
        self.asked: list[Registration] = []
        self.unhealthy = ""
        self.missing: list[str] = []

    def add(self, name: str, *, workers: int = 1, at_start: bool = False) -> FakeModel:
        model = FakeModel(name, Registration(url=f"{name}.mar"), workers)
        self.models[name] = model
        if at_start:
            self.startup.append(name)
        return model

    async def register(self, asked: Registration) -> tuple[str, Progress]:
        self.asked.append(asked)
        if asked.url.startswith("absent"):
            raise SourceNotFound(f"Model not found in model store: {asked.url}")
        name = asked.model_name or asked.url.removesuffix(".mar")
        if name in self.models:
            raise ModelExists(name)
        workers = self.default_workers if asked.initial_workers is None else asked.initial_workers
        model = FakeModel(name, asked, workers)
        if workers and asked.synchronous and asked.url.startswith("broken"):
            raise WorkersFailed()
        self.models[name] = model
        return name, self._progress(model, asked.synchronous)

    async def unregister(self, name: str) -> None:
        if self._find(name).asked.url.startswith("stuck"):
            raise UnregisterTimedOut(name)
        del self.models[name]
        if name in self.startup:
            self.startup.remove(name)

    async def scale(
        self, name: str, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Progress:
        model = self._find(name)
        model.least, model.most = min_workers, max_workers
        progress = self._progress(model, synchronous)
        return Progress.DONE if progress is Progress.REGISTERED else progress

    def names(self) -> list[tuple[str, str]]:
        return sorted((name, model.asked.url) for name, model in self.models.items())

    def describe(self, name: str) -> ModelDescription:
        model = self._find(name)
        return ModelDescription(
            modelName=name,
            modelUrl=model.asked.url,
            runtime=model.asked.runtime or "python",
            minWorkers=model.least,
            maxWorkers=model.most,
            batchSize=model.asked.batch_size,
            maxBatchDelay=100
            if model.asked.max_batch_delay_ms is None
            else model.asked.max_batch_delay_ms,
            loadedAtStartup=name in self.startup,
            workers=[
                WorkerDescription(
                    id=f"9000-{number:08x}",
                    startTime="2020-01-01T00:00:00.000Z",
                    status="LOADING" if model.is_loading else "READY",
                    gpu=False,
                    memoryUsage=0,
                )
                for number in range(model.least)
            ],
        )

    def health(self) -> str:
        return self.unhealthy or "Healthy"

    def missing_at_start(self) -> list[str]:
        return self.missing

    def sole_startup_model(self) -> str | None:
        return self.startup[0] if len(self.startup) == 1 else None

    def has(self, name: str) -> bool:
        return name in self.models

    def submit(self, name: str, job: Job) -> None:
        model = self._find(name)
        if not model.least:
            raise NoWorker(name)
        if not model.is_paused:
            model.run(job)
        elif len(model.waiting) < model.capacity:
            model.waiting.append(job)
        else:
            raise QueueFull(name, model.capacity)

    def _find(self, name: str) -> FakeModel:
        if name not in self.models:
            raise ModelNotFound(name)
        return self.models[name]

    def _progress(self, model: FakeModel, synchronous: bool) -> Progress:
        if not model.least:
            return Progress.REGISTERED
        if not synchronous:
            return Progress.STARTED
        return Progress.PARTIAL if model.asked.url.startswith("slow") else Progress.DONE
