"""The front's side of the zygote: start workers, signal them, hear of their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from mmserve import platform
from mmserve.config.launch import isolated_python
from mmserve.errors import WorkersFailed
from mmserve.wire.control import (
    Exited,
    FromZygote,
    LibraryReady,
    LibraryUnfit,
    Signal,
    Spawn,
    Start,
    Started,
    StartFailed,
    Unpacker,
    pack,
)
from mmserve.zygote import SINGLE_THREADED

log = logging.getLogger("mmserve.workers")

#: What most models on PyTorch import; the forms are those of `zygote._import`.
DEFAULT_IMPORTS = (
    "torch",
    "torchvision",
    "transformers:AutoModel",
    "transformers:AutoTokenizer",
    "transformers:AutoConfig",
    "transformers.models.auto.modeling_auto",
    "transformers:BertModel",
    "transformers:BertTokenizerFast",
    # Since version 5 the first `from_pretrained` compiles a thousand patterns, 0.2 s each time.
    "transformers.conversion_mapping:get_checkpoint_conversion_mapping(bert)",
)


class Exit(msgspec.Struct, frozen=True):
    """How a process ended.

    Attributes:
        code: exit status, or minus the number of the signal.
        was_out_of_memory: the kernel killed it for memory.
    """

    code: int
    was_out_of_memory: bool = False

    def __str__(self) -> str:
        if self.code >= 0:
            return f"It exited with status {self.code}."
        with contextlib.suppress(ValueError):
            name = signal.Signals(-self.code).name
            words = f"It was killed by signal {-self.code} ({name})"
            if self.was_out_of_memory:
                return words + ": the kernel ran out of memory."
            if self.code == -signal.SIGKILL:
                return words + ", probably out of memory."
            return words + "."
        return f"It was killed by signal {-self.code}."


class Process:
    """A process that the zygote reaps. `exited` is done once it is."""

    def __init__(self, pid: int, exited: asyncio.Future[Exit]) -> None:
        self.pid, self.exited = pid, exited


class Link:
    """A control link to the zygote, the library or a template, on the event loop."""

    def __init__(
        self, sock: socket.socket, heard: Callable[[msgspec.Struct], None], lost: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._socket, self._heard, self._lost = sock, heard, lost
        self._unpacker = Unpacker(FromZygote)
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._tickets = 0
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self.is_closed = False
        self._loop.add_reader(sock, self._read)

    async def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Raises ConnectionError when the other end is gone."""
        data = memoryview(pack(message))
        async with self._sending:
            if self.is_closed:
                raise ConnectionError("the control link is closed")
            while True:
                try:
                    sent = platform.send_with_fds(self._socket, data, fds)  # type: ignore[arg-type]
                    break
                except BlockingIOError:
                    await self._writable()
            if sent < len(data):
                await self._loop.sock_sendall(self._socket, data[sent:])

    async def start(self, order: Start | Spawn, fds: Sequence[int]) -> int:
        """Sends the order under a ticket; the pid. Raises WorkersFailed, ConnectionError."""
        self._tickets += 1
        order = msgspec.structs.replace(order, ticket=self._tickets)
        answer: asyncio.Future[int] = self._loop.create_future()
        self._waiting[order.ticket] = answer
        try:
            await self.send(order, fds)
            return await answer
        finally:
            self._waiting.pop(order.ticket, None)

    async def _writable(self) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(self._socket, writable.set)
        try:
            await writable.wait()
        finally:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._lost()
            return
        for message, _ in self._unpacker.feed(data):
            if isinstance(message, Started | StartFailed):
                self._answer(message)
            else:
                self._heard(message)

    def _answer(self, message: Started | StartFailed) -> None:
        answer = self._waiting.get(message.ticket)
        if answer is None or answer.done():
            return
        if isinstance(message, Started):
            answer.set_result(message.pid)
        else:
            answer.set_exception(WorkersFailed(message.cause, out_of_memory=message.out_of_memory))

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the control link was lost"))


class Library:
    """The process that holds the preloaded imports. `modules` is empty until it is ready."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.pid = 0
        self.modules: Mapping[str, str] = {}
        self.settled = asyncio.Event()  # ready, or there will be none

    @property
    def is_ready(self) -> bool:
        return bool(self.modules) and self.link is not None and not self.link.is_closed


class Zygote:
    """Keeps one zygote and one library alive, and knows every process they started.

    When the zygote dies, the workers live on as our own children (we are a subreaper); a new
    zygote and library take over the starting, and the adopted workers are signalled and reaped
    here.
    """

    def __init__(self, imports: Sequence[str], environ: Mapping[str, str]) -> None:
        self._imports, self._environ = list(imports), dict(environ)
        self.library = Library()
        self._link: Link | None = None
        self._pid = 0
        self._ready = asyncio.Event()
        self._exits: dict[int, asyncio.Future[Exit]] = {}
        self._early_exits: dict[int, Exit] = {}
        self._starting = 0
        self._adopted: set[int] = set()
        self._oom_kills = platform.oom_kills()
        self._is_stopping = False
        self._restarts: set[asyncio.Task[None]] = set()
        self._liveness_read, self._liveness_write = os.pipe2(os.O_CLOEXEC)
        self._failures = 0

    @property
    def pid(self) -> int:
        return self._pid

    # Life

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Zygote]:
        loop = asyncio.get_running_loop()
        platform.become_subreaper()
        # uvloop keeps SIGCHLD to itself in `add_signal_handler`; a handler of Python's runs in
        # this thread too, between two steps of the loop.
        before = signal.signal(
            signal.SIGCHLD, lambda *_: loop.call_soon_threadsafe(self._reap_own_children)
        )
        try:
            await self._launch()
            yield self
        finally:
            self._is_stopping = True
            for task in list(self._restarts):
                task.cancel()
            await self._end()
            signal.signal(signal.SIGCHLD, before)
            os.close(self._liveness_read)
            os.close(self._liveness_write)

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = (theirs.fileno(), self._liveness_read)
        words = [*isolated_python(), "-m", "mmserve.zygote"]
        words += ["--control", str(fds[0]), "--liveness", str(fds[1])]
        process = subprocess.Popen(  # noqa: ASYNC220 - it takes two milliseconds, once
            words,
            env=self._environ | SINGLE_THREADED,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        process.returncode = 0  # reaped by `_reap_own_children`, not by subprocess
        theirs.close()
        self._pid = process.pid
        self._link = Link(ours, self._heard, self._lost)
        self._ready.set()
        if self._imports:
            await self._launch_library()
        else:
            self.library.settled.set()

    async def _launch_library(self) -> None:
        library = self.library
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        null = os.open(os.devnull, os.O_RDWR)
        environ = self._environ | SINGLE_THREADED
        library.modules = {}
        library.link = Link(ours, self._library_heard, self._library_lost)
        assert self._link is not None
        try:
            library.pid = await self._link.start(
                Start(0, "library", environ, self._imports),
                (null, 1, 2, theirs.fileno()),
            )
            self._expect(library.pid)
        except (ConnectionError, WorkersFailed) as error:
            log.warning("the library process did not start", extra={"cause": str(error)})
            library.settled.set()
        finally:
            os.close(null)
            theirs.close()

    async def _end(self) -> None:
        """The zygote kills all that it started when its link closes."""
        for pid in self._adopted:
            platform.signal_group(pid, signal.SIGKILL)
        if self.library.link is not None:
            self.library.link.close()
        if self._link is not None:
            gone = asyncio.get_running_loop().create_future()
            self._exits[self._pid] = gone
            self._link.close()
            try:
                async with asyncio.timeout(5):
                    await gone
            except TimeoutError:
                os.kill(self._pid, signal.SIGKILL)
        for pid in list(self._exits):  # it reports no more, and has ended them all
            self._ended(pid, Exit(-signal.SIGKILL))

    # Starting and signalling

    async def start(self, kind: str, environ: Mapping[str, str], fds: Sequence[int]) -> Process:
        """Starts a process from the zygote itself: "fork", "exec" or "template".

        Raises:
            WorkersFailed: the system has no room for another process.
        """
        interpreter = isolated_python() if kind == "exec" else []
        order = Start(0, kind, dict(environ), [], interpreter)
        while True:
            await self._ready.wait()
            assert self._link is not None
            try:
                return await self._started(self._link, order, fds)
            except ConnectionError:
                if self._is_stopping:
                    raise WorkersFailed("the server is stopping") from None
                await asyncio.sleep(0)  # `_lost` has been called, or will be now

    async def spawn(
        self, link: Link, kind: str, environ: Mapping[str, str], fds: Sequence[int]
    ) -> Process:
        """Has a library or template fork a worker ("fork"), or a library a "template".

        Raises:
            ConnectionError: it is gone.
            WorkersFailed: the system has no room for another process.
        """
        return await self._started(link, Spawn(0, kind, dict(environ)), fds)

    async def _started(self, link: Link, order: Start | Spawn, fds: Sequence[int]) -> Process:
        # Who is forked by another than the zygote may be reported dead before it is reported born.
        self._starting += 1
        try:
            pid = await link.start(order, fds)
            return Process(pid, self._expect(pid))
        finally:
            self._starting -= 1
            if not self._starting:
                self._early_exits.clear()

    async def signal_group(self, process: Process, number: int) -> None:
        """Signals a process and its group; nothing where it is reaped already."""
        if process.exited.done():
            return
        if process.pid in self._adopted or self._link is None or self._link.is_closed:
            if platform.is_own_child(process.pid):
                platform.signal_group(process.pid, number)
            return
        with contextlib.suppress(ConnectionError):
            await self._link.send(Signal(process.pid, number))

    def _expect(self, pid: int) -> asyncio.Future[Exit]:
        exited = asyncio.get_running_loop().create_future()
        if early := self._early_exits.pop(pid, None):
            exited.set_result(early)
        else:
            self._exits[pid] = exited
        return exited

    # Hearing

    def _heard(self, message: msgspec.Struct) -> None:
        if isinstance(message, Exited):
            killed = message.oom_kills > self._oom_kills and message.code == -signal.SIGKILL
            self._oom_kills = max(self._oom_kills, message.oom_kills)
            self._ended(message.pid, Exit(message.code, killed))

    def _ended(self, pid: int, how: Exit) -> None:
        self._adopted.discard(pid)
        exited = self._exits.pop(pid, None)
        if exited is not None:
            if not exited.done():
                exited.set_result(how)
        elif self._starting:
            self._early_exits[pid] = how

    def _library_heard(self, message: msgspec.Struct) -> None:
        if isinstance(message, LibraryUnfit):
            log.warning(
                "an import started threads and is left out of preload_imports",
                extra={"imported": message.module, "threads": message.threads},
            )
            self._imports.remove(message.module)
        if isinstance(message, LibraryReady):
            self.library.modules = message.modules
            self.library.settled.set()
            for one in message.imports:
                fields = {"imported": one.module, "s": round(one.seconds, 3)}
                fields |= {"rss_mb": one.rss_bytes >> 20}
                if one.error:
                    log.info("not preloaded", extra=fields | {"cause": one.error})
                else:
                    log.info("preloaded", extra=fields)

    def _library_lost(self) -> None:
        self.library.modules = {}
        if self._is_stopping or self._link is None or self._link.is_closed:
            return
        self._failures += 1
        if self._failures > 20 or not self._imports:
            self.library.settled.set()
            log.error("the library process keeps dying; workers start without preloaded imports")
            return
        self._own(self._launch_library())

    def _lost(self) -> None:
        """The zygote is gone. Its children are ours now."""
        self._ready.clear()
        if self._is_stopping:
            return
        self._adopted |= self._exits.keys()
        self._reap_own_children()
        if self.library.link is not None:
            self.library.link.close()
            platform.signal_group(self.library.pid, signal.SIGKILL)
        log.error("the zygote died; a new one takes over", extra={"pid": self._pid})
        self._own(self._launch())

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    def _reap_own_children(self) -> None:
        """Children of this process: the zygote, the fetcher, and what a dead zygote left us."""
        for pid, code in platform.dead_children():
            if pid in self._adopted:
                platform.signal_group(pid, signal.SIGKILL)
            platform.reap(pid)
            if pid in self._exits:
                self._ended(pid, Exit(code, code == -signal.SIGKILL and self._oom_grew()))

    def _oom_grew(self) -> bool:
        before, self._oom_kills = self._oom_kills, platform.oom_kills()
        return self._oom_kills > before
