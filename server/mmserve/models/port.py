"""What the API asks of the house that keeps the models. `serve.py` wires the real one."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec

from mmserve.scheduling.job import Job


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A registration as asked for; None stands for the default.

    Attributes:
        url: archive file, directory or URL.
        batch_size: requests per batch; below 1 behaves as 1 and is reported as given.
        max_batch_delay_ms: None when the registration does not name one (100 is reported).
        initial_workers: None for `default_workers_per_model`.
        synchronous: wait for the workers.
        response_timeout_s: None for the setting's.
        preload_model: None for the setting's.
    """

    url: str
    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    batch_size: int = 1
    max_batch_delay_ms: int | None = None
    initial_workers: int | None = None
    synchronous: bool = True
    response_timeout_s: float | None = None
    preload_model: bool | None = None


class Progress(Enum):
    """How far a registration or a scaling is when it answers."""

    REGISTERED = "registered"  # no worker was asked for
    DONE = "done"  # all workers are ready
    PARTIAL = "partial"  # some are
    STARTED = "started"  # nobody waited


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    startTime: str  # noqa: N815 - the wire's spelling
    status: str
    gpu: bool
    memoryUsage: int  # noqa: N815
    pid: int | None = None
    start: str | None = None  # "fork", "fresh" or "template"
    startReason: str | None = None  # noqa: N815


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """GET /models/{name}, in the order and spelling of the wire. UNSET fields are left out."""

    modelName: str  # noqa: N815
    modelVersion: str | msgspec.UnsetType = msgspec.UNSET  # noqa: N815
    modelUrl: str  # noqa: N815
    engine: str | msgspec.UnsetType = msgspec.UNSET
    runtime: str
    minWorkers: int  # noqa: N815
    maxWorkers: int  # noqa: N815
    batchSize: int  # noqa: N815
    maxBatchDelay: int  # noqa: N815
    loadedAtStartup: bool  # noqa: N815
    workers: list[WorkerDescription]
    state: str | msgspec.UnsetType = msgspec.UNSET  # only where it is not plain: PARKED, FAILED
    cause: str | msgspec.UnsetType = msgspec.UNSET


class Models(Protocol):
    """All the API can ask for. Coroutines may take long; the rest answers at once."""

    async def register(self, asked: Registration) -> tuple[str, Progress]:
        """The model's name and how far it is.

        Raises:
            SourceNotFound, DownloadFailed, InvalidModel, StorageFailed: the archive.
            ModelExists: the name is taken.
            WorkersFailed: synchronous, and a worker did not come up; the name is free again.
        """

    async def unregister(self, name: str) -> None:
        """Returns when its processes are reaped, or the model is no longer missing.

        Raises ModelNotFound, UnregisterTimedOut.
        """

    async def scale(
        self, name: str, *, min_workers: int, max_workers: int, synchronous: bool
    ) -> Progress:
        """Raises ModelNotFound, WorkersFailed."""

    def names(self) -> list[tuple[str, str]]:
        """(name, url as given at registration) of every model, sorted by name."""

    def describe(self, name: str) -> ModelDescription:
        """Raises ModelNotFound."""

    def health(self) -> str:
        """`Healthy`, `Partial Healthy` or `Unhealthy`."""

    def missing_at_start(self) -> list[str]:
        """Models to be loaded at start that could not be registered, and are wanted still."""

    def sole_startup_model(self) -> str | None:
        """The one model loaded at start, where there is exactly one."""

    def has(self, name: str) -> bool: ...

    def submit(self, name: str, job: Job) -> None:
        """Hands the job over; `job.deliver` will be called, perhaps before this returns.

        Raises:
            ModelNotFound, NoWorker, QueueFull: the job was not taken.
        """
