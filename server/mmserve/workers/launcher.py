"""Starts the processes of workers: forked, fresh, or from a template."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from mmserve.errors import WorkersFailed
from mmserve.logs.output import OutputLine, OutputReader
from mmserve.logs.pump import OutputPump
from mmserve.metrics.lines import from_worker
from mmserve.runtime.paths import clashes
from mmserve.wire.messages import Load
from mmserve.workers.blueprint import Blueprint, Way, choose_way
from mmserve.workers.worker import Worker, pipe_for_output
from mmserve.workers.zygote import Link, Process, Zygote

#: (worker, "stdout" or "stderr", what it wrote)
Listen = Callable[[Worker, str, list[OutputLine]], None]


class Template:
    """A process that has the model loaded and forks its workers."""

    def __init__(self, worker: Worker, link: Link, can_fork: bool, why_not: str) -> None:
        self.worker, self.link = worker, link
        self.can_fork, self.why_not = can_fork, why_not
        self.was_given_away = False


class Launcher:
    """Starts workers by the zygote's hand.

    Args:
        listen: gets what workers print.
        worker_start: the setting.
        load_timeout_s: how long a model may take to load.
        max_processes: of all models together; None for no limit.
    """

    def __init__(
        self,
        zygote: Zygote,
        listen: Listen,
        *,
        worker_start: str,
        load_timeout_s: float,
        max_processes: int | None = None,
    ) -> None:
        self.zygote = zygote
        self._listen = listen
        self._worker_start = worker_start
        self.load_timeout_s = load_timeout_s
        self._max_processes = max_processes
        self._processes: set[Process] = set()

    async def launch(self, worker: Worker, blueprint: Blueprint) -> None:
        """Starts the process and loads the model: the worker is ready after this.

        Raises:
            WorkersFailed: it did not come up. The worker's process, if any, still has to be
                stopped.
        """
        while True:
            way = await self._way(blueprint)
            try:
                await self._start(worker, blueprint, way, template=False)
                break
            except ConnectionError:
                await asyncio.sleep(0)  # the library died; another way will be chosen
        await worker.load(_load_order(blueprint, worker), self.load_timeout_s)

    async def launch_template(self, worker: Worker, blueprint: Blueprint) -> Template:
        """Starts a process that loads the model and forks workers. Raises WorkersFailed."""
        while True:
            way = await self._way(blueprint)
            try:
                link = await self._start(worker, blueprint, way, template=True)
                break
            except ConnectionError:
                await asyncio.sleep(0)
        assert link is not None
        loaded = await worker.load(_load_order(blueprint, worker), self.load_timeout_s)
        worker.start = "template"
        return Template(worker, link, loaded.can_fork, loaded.why_not)

    async def launch_from(self, template: Template, worker: Worker, blueprint: Blueprint) -> None:
        """Forks a worker that has the model already. Raises WorkersFailed, ConnectionError."""
        out, err = self._outputs(worker)
        wire, theirs = socket.socketpair()
        try:
            process = await self.zygote.spawn(
                template.link, "fork", blueprint.environ, (theirs.fileno(), out, err)
            )
        except BaseException:
            wire.close()
            raise
        finally:
            theirs.close()
            os.close(out)
            os.close(err)
        worker.start = "template"
        self._count(process)
        await worker.attach(process, wire)
        await worker.load(_load_order(blueprint, worker), self.load_timeout_s)

    async def _way(self, blueprint: Blueprint) -> Way:
        library = self.zygote.library
        while True:
            clash = clashes(blueprint.top_names, library.modules) if library.is_ready else None
            way = choose_way(
                blueprint,
                worker_start=self._worker_start,
                has_library=library.is_ready,
                is_settled=library.settled.is_set(),
                clash=clash,
            )
            if way.kind != "wait":
                return way
            await library.settled.wait()

    async def _start(
        self, worker: Worker, blueprint: Blueprint, way: Way, *, template: bool
    ) -> Link | None:
        worker.start = "fresh" if way.kind == "fresh" else "fork"
        worker.start_reason = way.reason
        out, err = self._outputs(worker)
        wire, theirs = socket.socketpair()
        ours, control = socket.socketpair() if template else (None, None)
        fds = [theirs.fileno(), out, err]
        fds += [control.fileno()] if control is not None else []
        try:
            process = await self._ask(way, blueprint, fds, template=template)
        except BaseException:
            wire.close()
            if ours is not None:
                ours.close()
            raise
        finally:
            theirs.close()
            os.close(out)
            os.close(err)
            if control is not None:
                control.close()
        self._count(process)
        await worker.attach(process, wire)
        return Link(ours, lambda _: None, lambda: None) if ours is not None else None

    async def _ask(
        self, way: Way, blueprint: Blueprint, fds: list[int], *, template: bool
    ) -> Process:
        kind = "template" if template else "fork"
        environ = blueprint.environ
        if way.kind == "library":
            link = self.zygote.library.link
            if link is None:
                raise ConnectionError("the library is gone")
            return await self.zygote.spawn(link, kind, environ, fds)
        if way.kind == "fresh" and not template:
            return await self.zygote.start("exec", environ, fds)
        return await self.zygote.start(kind, environ, fds)

    def _outputs(self, worker: Worker) -> tuple[int, int]:
        """Write ends of two pipes whose read ends are listened to until they end.

        Raises:
            WorkersFailed: there are as many processes as there may be.
        """
        if self._max_processes is not None and len(self._processes) >= self._max_processes:
            raise WorkersFailed(
                f"{len(self._processes)} worker processes run already; "
                "max_worker_processes sets the limit",
                out_of_memory=True,
            )
        ends = []
        for stream in ("stdout", "stderr"):
            read, write = pipe_for_output()
            ends.append(write)
            self._listen_to(worker, stream, read)
        return ends[0], ends[1]

    def _count(self, process: Process) -> None:
        self._processes.add(process)
        process.exited.add_done_callback(lambda _: self._processes.discard(process))

    def _listen_to(self, worker: Worker, stream: str, fd: int) -> None:
        def heard(lines: list[OutputLine]) -> None:
            self._listen(worker, stream, lines)

        loop = asyncio.get_running_loop()
        metric = from_worker if stream == "stdout" else None
        worker.pumps.append(OutputPump(loop, fd, heard, reader=OutputReader(metric)))


def _load_order(blueprint: Blueprint, worker: Worker) -> Load:
    return Load(
        blueprint.model_name,
        blueprint.model_dir,
        blueprint.handler,
        blueprint.batch_size,
        worker.gpu_id,
        blueprint.manifest,
        blueprint.decode_input,
        blueprint.max_response_size,
    )
