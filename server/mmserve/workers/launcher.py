"""Starts the processes of workers: forked, fresh, or from a template."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

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
    """A process that has the model loaded and forks its workers.

    Attributes:
        can_fork: its process may be forked; `why_not` says why it may not.
        was_given_away: its process has become an ordinary worker.
    """

    def __init__(self, worker: Worker, link: Link, can_fork: bool, why_not: str) -> None:
        self.worker, self.link = worker, link
        self.can_fork, self.why_not = can_fork, why_not
        self.was_given_away = False

    @property
    def is_spent(self) -> bool:
        """Its process has ended."""
        return self.link.is_closed or self.worker.ended.done()


class Launcher:
    """Starts workers by the zygote's hand.

    Args:
        listen: gets what workers print.
        worker_start: the setting.
        load_timeout_s: how long a model may take to load; None for no limit.
        max_processes: of all models together; None for no limit.
    """

    def __init__(
        self,
        zygote: Zygote,
        listen: Listen,
        *,
        worker_start: str,
        load_timeout_s: float | None,
        max_processes: int | None = None,
    ) -> None:
        self.zygote = zygote
        self._listen = listen
        self._worker_start = worker_start
        self.load_timeout_s = load_timeout_s
        self._max_processes = max_processes
        self._count = 0  # processes that run, or are asked for

    async def launch(self, worker: Worker, blueprint: Blueprint) -> None:
        """Starts the process and loads the model: the worker is ready after this.

        Raises:
            WorkersFailed: it did not come up, or was aborted. The worker's process, if any,
                still has to be stopped.
        """
        while True:
            way = await self._way(worker, blueprint)
            with contextlib.suppress(ConnectionError):  # who should have forked it has died
                await self._start(worker, blueprint, way)
                break
        await worker.load(_load_order(blueprint, worker), self.load_timeout_s)

    async def launch_template(self, worker: Worker, blueprint: Blueprint) -> Template:
        """Starts a process that loads the model and forks workers. Raises as `launch` does."""
        while True:
            way = await self._way(worker, blueprint)
            ours, control = socket.socketpair()
            try:
                await self._start(worker, blueprint, way, control)
                break
            except BaseException as error:
                ours.close()
                if not isinstance(error, ConnectionError):
                    raise
            finally:
                control.close()
        link = Link(ours, lambda _: None, lambda: None)
        try:
            loaded = await worker.load(_load_order(blueprint, worker), self.load_timeout_s)
        except BaseException:
            link.close()
            raise
        worker.start = "template"
        return Template(worker, link, loaded.can_fork, loaded.why_not)

    async def launch_from(self, template: Template, worker: Worker, blueprint: Blueprint) -> None:
        """Forks a worker that has the model already.

        Raises:
            ConnectionError: the template has died. Otherwise as `launch`.
        """
        worker.start = "template"

        def fork(fds: list[int]) -> Awaitable[Process]:
            return self.zygote.spawn(template.link, "fork", blueprint.environ, fds)

        await self._attach(worker, fork)
        await worker.load(_load_order(blueprint, worker), self.load_timeout_s)

    async def _way(self, worker: Worker, blueprint: Blueprint) -> Way:
        zygote, library = self.zygote, self.zygote.library
        while True:
            worker.raise_if_aborted()
            if zygote.is_stopping:
                raise WorkersFailed("the server is stopping")
            if not zygote.is_up.is_set():
                await worker.unless_aborted(zygote.is_up.wait())
            if not library.is_ready:
                await worker.unless_aborted(zygote.is_known.wait())
            held = library.modules if library.is_ready else zygote.modules
            clash = clashes(blueprint.top_names, held)
            way = choose_way(
                blueprint,
                worker_start=self._worker_start,
                has_library=library.is_ready,
                is_settled=library.settled.is_set(),
                clash=clash,
            )
            if way.kind != "wait":
                return way
            self.zygote.want_library()
            try:
                async with asyncio.timeout(self.load_timeout_s):
                    await worker.unless_aborted(library.settled.wait())
            except TimeoutError:  # one of the imports may hang
                library.settled.set()  # nobody else waits for it
                if clash is None:
                    return Way("bare", "the preloaded libraries were not ready in time")
                return Way("fresh", clash)

    async def _start(
        self,
        worker: Worker,
        blueprint: Blueprint,
        way: Way,
        control: socket.socket | None = None,
    ) -> None:
        """Starts the process of a worker or, where there is a control link, of a template."""
        worker.start = "fresh" if way.kind == "fresh" else "fork"
        worker.start_reason = way.reason
        zygote, environ = self.zygote, blueprint.environ
        kind = "fork" if control is None else "template"

        def ask(fds: list[int]) -> Awaitable[Process]:
            if control is not None:
                fds = [*fds, control.fileno()]
            if way.kind == "library":
                if (link := zygote.library.link) is None:
                    raise ConnectionError("the library is gone")
                return zygote.spawn(link, kind, environ, fds)
            if way.kind == "fresh" and control is None:
                return zygote.start("exec", environ, fds)
            return zygote.start(kind, environ, fds)

        await self._attach(worker, ask)

    async def _attach(self, worker: Worker, ask: Callable[[list[int]], Awaitable[Process]]) -> None:
        """Makes descriptors, has a process started with them, and keeps the other ends."""
        self._take_place()
        process = None
        try:
            with _closed_afterwards() as fds:
                wire = self._descriptors(worker, fds)
                try:
                    process = await ask(fds)
                    await worker.attach(process, wire)
                except BaseException:
                    wire.close()
                    raise
        finally:
            if process is None:
                self._give_place()
            else:
                process.exited.add_done_callback(self._give_place)
        worker.raise_if_aborted()

    def _descriptors(self, worker: Worker, fds: list[int]) -> socket.socket:
        """Our end of a new wire; `fds` gets what the process needs: its end, stdout, stderr."""
        wire, theirs = socket.socketpair()
        try:
            fds.append(theirs.detach())
            for stream in ("stdout", "stderr"):
                read, write = pipe_for_output()
                fds.append(write)
                self._listen_to(worker, stream, read)
        except BaseException:
            wire.close()
            raise
        return wire

    def _take_place(self) -> None:
        """Raises WorkersFailed: there are as many processes as there may be."""
        if self._max_processes is not None and self._count >= self._max_processes:
            raise WorkersFailed(
                f"{self._count} worker processes run already; max_worker_processes sets the limit",
                out_of_memory=True,
            )
        self._count += 1

    def _give_place(self, _: object = None) -> None:
        self._count -= 1

    def log_as_output(self, worker: Worker, text: str) -> None:
        """Logs a text as if the worker had printed it, line by line."""
        if text:
            lines = [OutputLine(line) for line in text.rstrip("\n").splitlines()]
            self._listen(worker, "stderr", lines)

    def _listen_to(self, worker: Worker, stream: str, fd: int) -> None:
        def heard(lines: list[OutputLine]) -> None:
            self._listen(worker, stream, lines)

        loop = asyncio.get_running_loop()
        metric = from_worker if stream == "stdout" else None
        worker.pumps.append(OutputPump(loop, fd, heard, reader=OutputReader(metric)))


@contextlib.contextmanager
def _closed_afterwards() -> Iterator[list[int]]:
    """For descriptors that somebody else has by then, or nobody."""
    fds: list[int] = []
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


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
        busy_poll_s=blueprint.busy_poll_s,
    )
