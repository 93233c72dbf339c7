"""A house without a front door: zygote, launcher, pools and dispatchers, all real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop

from mmserve.errors import ServeError, WorkersFailed
from mmserve.logs.output import OutputLine
from mmserve.scheduling.batcher import Batcher
from mmserve.scheduling.busy_poll import BusyPoll
from mmserve.scheduling.dispatcher import Dispatcher
from mmserve.scheduling.job import Job, Result
from mmserve.wire.messages import Parameter
from mmserve.workers.blueprint import Blueprint
from mmserve.workers.exits import Exit
from mmserve.workers.launcher import Launcher
from mmserve.workers.pool import Policy, Pool, Slot
from mmserve.workers.worker import Worker
from mmserve.workers.zygote import Zygote

LIMIT_S = 30.0


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs a test on uvloop, which must end in time and leave no task."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


class Living:
    """One model with its workers and its queue."""

    def __init__(
        self,
        house: House,
        directory: Path,
        *,
        batch_size: int = 1,
        delay_s: float = 0.0,
        capacity: int = 100,
        response_timeout_s: float = 20,
        policy: Policy | None = None,
        **blueprint: Any,
    ) -> None:
        self.house = house
        self.blueprint = Blueprint(
            **{
                "model_name": directory.name,
                "model_dir": str(directory),
                "handler": "service:handle",
                "manifest": "",
                "batch_size": batch_size,
                "decode_input": True,
                "max_response_size": 1 << 20,
                "environ": dict(os.environ),
            }
            | blueprint
        )
        batcher = Batcher(directory.name, capacity, batch_size, delay_s, 60)
        self.dispatcher = Dispatcher(
            directory.name,
            batcher,
            response_timeout_s=response_timeout_s,
            busy_poll=BusyPoll(0.0),
        )
        self.given_up: WorkersFailed | None = None
        self.metrics: list[str] = []
        self.ready: asyncio.Queue[Worker] = asyncio.Queue()
        self.gone: asyncio.Queue[Exit] = asyncio.Queue()
        self.pool = Pool(
            self.blueprint,
            house.launcher,
            self,
            policy or Policy(),
            spawn=house.spawn,
            assign_gpu=lambda: None,
            now_text=lambda: "",
            port=9000,
        )

    # pool.Hooks

    def worker_ready(self, worker: Worker) -> None:
        self.dispatcher.worker_ready(worker)
        self.ready.put_nowait(worker)

    def worker_retired(self, worker: Worker) -> None:
        self.dispatcher.worker_retired(worker)

    def worker_gone(self, worker: Worker, how: Exit) -> None:
        self.dispatcher.worker_gone(worker, how)
        self.gone.put_nowait(how)

    def worker_metrics(self, lines: list[str]) -> None:
        self.metrics.extend(lines)

    def worker_failed(self) -> None:
        pass

    def workers_given_up(self, cause: WorkersFailed) -> None:
        self.given_up = cause
        self.gone.put_nowait(Exit(0))

    # What tests do

    async def start(self, workers: int = 1) -> list[Slot]:
        """Raises what the first worker that failed said."""
        slots = self.pool.grow(workers)
        for slot in slots:
            if failure := await slot.first_attempt:
                raise failure
        return slots

    def ask(self, body: str = "") -> asyncio.Future[Result | ServeError]:
        """Puts a job; the future is its outcome."""
        outcome = asyncio.get_running_loop().create_future()
        value = body.encode()
        parameters = [(Parameter("body", len(value), "text/plain"), value)]

        def deliver(result: Result | ServeError) -> None:
            if not outcome.done():
                outcome.set_result(result)

        self.dispatcher.submit(Job("id", [], parameters, deliver))
        return outcome

    async def answer(self, body: str = "") -> str:
        """The text of a successful result."""
        outcome = await self.ask(body)
        if isinstance(outcome, ServeError):
            raise outcome
        return bytes(outcome.body).decode()

    async def close(self, *, timeout_s: float = 10) -> None:
        self.dispatcher.forget_queue()
        await self.pool.close(timeout_s=timeout_s)
        self.dispatcher.close()


class House:
    def __init__(self, zygote: Zygote, launcher: Launcher, tasks: asyncio.TaskGroup) -> None:
        self.zygote, self.launcher, self._tasks = zygote, launcher, tasks
        self.lines: list[str] = []
        self._living: list[Living] = []

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._tasks.create_task(work)

    def model(self, directory: Path, **options: Any) -> Living:
        self._living.append(Living(self, directory, **options))
        return self._living[-1]

    async def close(self) -> None:
        for living in self._living:
            await living.close(timeout_s=1)


@contextlib.asynccontextmanager
async def open_house(
    *imports: str,
    worker_start: str = "fork",
    load_timeout_s: float = 20,
    max_processes: int | None = None,
) -> AsyncIterator[House]:
    zygote = Zygote(imports, os.environ, library_delay_s=0)
    async with asyncio.TaskGroup() as tasks, zygote.running():
        lines: list[str] = []

        def listen(worker: Worker, stream: str, said: list[OutputLine]) -> None:
            lines.extend(line.text for line in said)

        launcher = Launcher(
            zygote,
            listen,
            worker_start=worker_start,
            load_timeout_s=load_timeout_s,
            max_processes=max_processes,
        )
        house = House(zygote, launcher, tasks)
        house.lines = lines
        try:
            yield house
        finally:
            await house.close()


Write = Callable[..., Path]


def write_model(directory: Path, predict: str, *, load: str = "pass", setup: str = "") -> Path:
    """A model whose handler runs `predict` (it sees `body`, a str) for each request."""
    directory.mkdir(parents=True, exist_ok=True)
    body = textwrap.indent(textwrap.dedent(predict).strip(), "    ")
    (directory / "service.py").write_text(
        "import ctypes, os, signal, subprocess, sys, threading, time\n"
        f"{textwrap.dedent(setup)}\n"
        f"def one(body):\n{body}\n"
        "def handle(data, context):\n"
        "    if data is None:\n"
        f"{textwrap.indent(textwrap.dedent(load).strip(), '        ')}\n"
        "        return None\n"
        "    return [one(item['body']) for item in data]\n"
    )
    return directory


async def until(question: Callable[[], bool], *, limit_s: float = 10) -> None:
    """For what only the operating system knows: asks again and again."""
    end = time.monotonic() + limit_s
    while not question():
        if time.monotonic() > end:
            raise AssertionError("not in time")
        await asyncio.sleep(0.01)


def descriptors() -> int:
    """Open ones of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
