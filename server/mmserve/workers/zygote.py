"""The front's side of the zygote: start workers, signal them, hear of their end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
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
    Up,
    environ_of,
    pack,
)
from mmserve.workers.exits import Exit, OomKills
from mmserve.workers.life import Restarts
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

#: Seconds after the zygote's start when the library starts, if nobody has wanted it before.
LIBRARY_DELAY_S = 3.0
#: Deaths in a row after which there is no library any more.
LIBRARY_RESTARTS = 5
#: Seconds that a zygote may take to end, and with it all that it started.
END_LIMIT_S = 5.0


class Process:
    """A process that the zygote reaps.

    Attributes:
        exited: done once it is reaped.
        is_killed: we have sent it SIGKILL.
    """

    __slots__ = ("exited", "is_killed", "pid")

    def __init__(self, pid: int, exited: asyncio.Future[Exit]) -> None:
        self.pid, self.exited = pid, exited
        self.is_killed = False


class Link:
    """A control link to the zygote, the library or a template, on the event loop.

    Args:
        heard: gets every message that is no answer to a start.
        lost: called once, when the other end is gone.
    """

    def __init__(
        self, sock: socket.socket, heard: Callable[[msgspec.Struct], None], lost: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._socket, self._heard, self._lost = sock, heard, lost
        self._unpacker = Unpacker(FromZygote)
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()  # with descriptors of our own
        self._tickets = 0
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self.is_closed = False
        self._loop.add_reader(sock, self._read)

    def post(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Sends, or keeps what the socket does not take. Raises ConnectionError: it is closed."""
        if self.is_closed:
            raise ConnectionError("the control link is closed")
        data = memoryview(pack(message))
        if not self._unsent:
            sent = self._try(data, fds)
            if sent == len(data):
                return
            data = data[sent:]
            if sent:  # descriptors travel with the first byte
                fds = ()
            self._loop.add_writer(self._socket, self._write)
        self._unsent.append((data, _copies(fds)))

    async def start(self, order: Start | Spawn, fds: Sequence[int]) -> int:
        """Sends the order under a ticket; the pid. Raises WorkersFailed, ConnectionError."""
        self._tickets += 1
        order = msgspec.structs.replace(order, ticket=self._tickets)
        answer: asyncio.Future[int] = self._loop.create_future()
        self._waiting[order.ticket] = answer
        try:
            self.post(order, fds)
            return await answer
        finally:
            self._waiting.pop(order.ticket, None)

    def read_rest(self) -> None:
        """Hears what the other end said before it went, and closes."""
        while not self.is_closed and self._read():
            pass
        self.close()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._socket)
        if self._unsent:
            self._loop.remove_writer(self._socket)
        while self._unsent:
            _close_all(self._unsent.popleft()[1])
        self._socket.close()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the control link was lost"))

    def _try(self, data: memoryview, fds: Sequence[int]) -> int:
        """Bytes that the socket took; of a link that is lost, all: the reader will see it."""
        try:
            return platform.send_with_fds(self._socket, data, fds)  # type: ignore[arg-type]
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(data)

    def _write(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            sent = self._try(data, fds)
            if not sent:
                return
            _close_all(fds)
            if sent < len(data):
                self._unsent[0] = (data[sent:], [])
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._socket)

    def _read(self) -> bool:
        """Whether something came."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            self._lost()
            return False
        for message, _ in self._unpacker.feed(data):
            if isinstance(message, Started | StartFailed):
                self._answer(message)
            else:
                self._heard(message)
        return True

    def _answer(self, message: Started | StartFailed) -> None:
        answer = self._waiting.get(message.ticket)
        if answer is None or answer.done():
            return
        if isinstance(message, Started):
            answer.set_result(message.pid)
        else:
            answer.set_exception(WorkersFailed(message.cause, out_of_memory=message.out_of_memory))


class Library:
    """The process that holds the preloaded imports. `modules` is empty until it is ready."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.process: Process | None = None
        self.modules: Mapping[str, str] = {}
        self.settled = asyncio.Event()  # ready, or nobody should wait for it
        self.ready_at: float | None = None

    def close_link(self) -> None:
        if self.link is not None:
            self.link.close()

    @property
    def pid(self) -> int:
        """0 before there was one."""
        return self.process.pid if self.process is not None else 0

    @property
    def is_ready(self) -> bool:
        return bool(self.modules) and self.link is not None and not self.link.is_closed


class Zygote:
    """Keeps one zygote and one library alive, and knows every process they started.

    When the zygote dies, the workers live on as our own children (we are a subreaper); a new
    zygote and library take over the starting, and the orphans are signalled and reaped here.

    Args:
        imports: modules that the library imports.
        environ: environment of the zygote and the library.
        library_delay_s: the library starts so long after the zygote, or when a worker wants it.
            Models that need no library, and are registered right after the start, then have the
            processors for themselves.

    Attributes:
        is_up: set while there is a zygote to start processes.
        modules: top-level names that the zygote itself holds, once `is_known`.
    """

    def __init__(
        self,
        imports: Sequence[str],
        environ: Mapping[str, str],
        *,
        library_delay_s: float = LIBRARY_DELAY_S,
    ) -> None:
        self._imports, self._environ = list(imports), dict(environ)
        self._library_delay_s = library_delay_s
        self._is_library_wanted = False
        self.library = Library()
        self.is_up = asyncio.Event()
        self.modules: Mapping[str, str] = {}
        self.is_known = asyncio.Event()
        self._link: Link | None = None
        self._pid = 0
        self._up_at = 0.0
        self._processes: dict[int, Process] = {}
        self._early_exits: dict[int, Exit] = {}
        self._starting = 0
        self._oom_kills = OomKills(platform.oom_kills())
        self._is_stopping = False
        self._gone: asyncio.Future[None] | None = None  # somebody waits for the zygote's end
        self._tasks: set[asyncio.Task[None]] = set()
        self._liveness_read, self._liveness_write = os.pipe2(os.O_CLOEXEC)
        self._restarts, self._library_restarts = Restarts(), Restarts(LIBRARY_RESTARTS)
        self._starts = 0  # processes that this zygote has started
        self._is_unfit = False  # the library is ending because of an import that we left out

    @property
    def pid(self) -> int:
        """Of the zygote; 0 while there is none."""
        return self._pid

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

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
            self._launch()
            yield self
        finally:
            self._is_stopping = True
            for task in list(self._tasks):
                task.cancel()
            await self._end()
            signal.signal(signal.SIGCHLD, before)
            os.close(self._liveness_read)
            os.close(self._liveness_write)

    def _launch(self) -> None:
        """Starts a zygote. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        fds = (theirs.fileno(), self._liveness_read)
        words = [*isolated_python(), "-m", "mmserve.zygote"]
        words += ["--control", str(fds[0]), "--liveness", str(fds[1])]
        try:
            process = subprocess.Popen(
                words,
                env=self._environ | SINGLE_THREADED,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        process.returncode = 0  # reaped by `_reap_own_children`, not by subprocess
        self._pid, self._up_at, self._starts = process.pid, time.monotonic(), 0
        self._link = Link(ours, self._heard, self._lost)
        self.is_up.set()
        if not self._imports:
            self.library.settled.set()
        elif self._is_library_wanted:
            self._own(self._launch_library())
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self._library_delay_s, self.want_library)

    def want_library(self) -> None:
        """Starts the library, where there is one to be and it was not started yet."""
        if not self._is_library_wanted and self._imports and not self._is_stopping:
            self._is_library_wanted = True
            self._own(self._launch_library())

    async def _relaunch(self) -> None:
        was_used, ready_s = self._starts > 0, time.monotonic() - self._up_at
        while True:
            pause_s = self._restarts.pause_s(was_used=was_used, ready_s=ready_s)
            await asyncio.sleep(pause_s or 0)
            try:
                self._launch()
                return
            except OSError as error:
                log.error("no zygote can be started", extra={"cause": str(error)})
                was_used, ready_s = False, 0.0

    async def _launch_library(self) -> None:
        library = self.library
        if not self._library_restarts.failures:
            library.settled.clear()  # it will not take long
        library.modules, library.ready_at = {}, None
        try:
            await self._start_library()
        except ConnectionError:
            library.close_link()  # the next zygote starts the next library
        except (WorkersFailed, OSError) as error:
            log.warning("the library process did not start", extra={"cause": str(error)})
            library.close_link()
            self._library_lost()

    async def _start_library(self) -> None:
        """Raises ConnectionError, WorkersFailed, OSError."""
        zygote = self._link
        if zygote is None:
            raise ConnectionError("there is no zygote")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.library.link = Link(ours, self._library_heard, self._library_lost)
        with theirs, open(os.devnull, "r+b", buffering=0) as null:  # noqa: ASYNC230 - no disk
            order = Start(0, "library", environ_of(self._environ | SINGLE_THREADED), self._imports)
            fds = (null.fileno(), 1, 2, theirs.fileno())
            self.library.process = await self._started(zygote, order, fds)

    async def _end(self) -> None:
        """The zygote kills all that it started when its link closes."""
        for pid in self._processes:
            if platform.is_own_child(pid):
                platform.signal_child(pid, signal.SIGKILL)
        self.library.close_link()
        if self._link is not None:
            self._link.close()
        if self._pid and platform.is_own_child(self._pid):
            self._gone = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(END_LIMIT_S):
                    await self._gone
            except TimeoutError:
                if platform.is_own_child(self._pid):
                    os.kill(self._pid, signal.SIGKILL)
        for pid in list(self._processes):  # it reports no more, and has ended them all
            self._ended(pid, -signal.SIGKILL)

    # Starting and signalling

    async def start(self, kind: str, environ: Mapping[str, str], fds: Sequence[int]) -> Process:
        """Starts a process from the zygote itself: "fork", "exec" or "template".

        Raises:
            ConnectionError: there is no zygote, or it died meanwhile; the descriptors may be with
                a process that nobody knows, so that another try needs other ones.
            WorkersFailed: the system has no room for another process.
        """
        if self._link is None:
            raise ConnectionError("there is no zygote")
        interpreter = isolated_python() if kind == "exec" else []
        order = Start(0, kind, environ_of(environ), [], interpreter)
        process = await self._started(self._link, order, fds)
        self._starts += 1
        return process

    async def spawn(
        self, link: Link, kind: str, environ: Mapping[str, str], fds: Sequence[int]
    ) -> Process:
        """Has a library or template fork a worker ("fork"), or a library a "template".

        Raises:
            ConnectionError: it is gone; the descriptors are spent, as those of `start`.
            WorkersFailed: the system has no room for another process.
        """
        return await self._started(link, Spawn(0, kind, environ_of(environ)), fds)

    async def _started(self, link: Link, order: Start | Spawn, fds: Sequence[int]) -> Process:
        if self._is_stopping:
            raise WorkersFailed("the server is stopping")
        # Who is forked by another than the zygote may be reported dead before it is reported born.
        self._starting += 1
        try:
            return self._expect(await link.start(order, fds))
        finally:
            self._starting -= 1
            if not self._starting:
                self._early_exits.clear()

    def kill(self, process: Process) -> None:
        """SIGKILL to a process and its group; nothing where it is reaped already."""
        if process.exited.done():
            return
        process.is_killed = True
        if platform.is_own_child(process.pid):  # its zygote died
            platform.signal_child(process.pid, signal.SIGKILL)
        elif self._link is not None:
            # Where it is lost, or will be before it is read: `_zygote_ended` kills.
            with contextlib.suppress(ConnectionError):
                self._link.post(Signal(process.pid, signal.SIGKILL))

    def _expect(self, pid: int) -> Process:
        process = Process(pid, asyncio.get_running_loop().create_future())
        if early := self._early_exits.pop(pid, None):
            process.exited.set_result(early)
        else:
            self._processes[pid] = process
        return process

    # Hearing

    def _heard(self, message: msgspec.Struct) -> None:
        if isinstance(message, Up):
            self.modules = message.modules
            self.is_known.set()
        elif isinstance(message, Exited):
            self._ended(message.pid, message.code, message.oom_kills)

    def _ended(self, pid: int, code: int | None, oom_kills: int = 0) -> None:
        self._oom_kills.look(oom_kills, time.monotonic())
        process = self._processes.pop(pid, None)
        is_ours = process is not None and process.is_killed
        is_struck = code == -signal.SIGKILL and not is_ours and self._oom_kills.explain()
        if process is not None:
            if not process.exited.done():
                process.exited.set_result(Exit(code, is_struck))
        elif self._starting:
            self._early_exits[pid] = Exit(code, is_struck)

    def _library_heard(self, message: msgspec.Struct) -> None:
        if isinstance(message, LibraryUnfit):
            log.warning(
                "an import started threads and is left out of preload_imports",
                extra={"imported": message.module, "threads": message.threads},
            )
            self._imports.remove(message.module)
            self._is_unfit = True
        if isinstance(message, LibraryReady):
            self.library.modules = message.modules
            self.library.ready_at = time.monotonic()
            self.library.settled.set()
            for one in message.imports:
                fields = {"imported": one.module, "s": round(one.seconds, 3)}
                fields |= {"rss_mb": one.rss_bytes >> 20}
                if one.error:
                    log.info("not preloaded", extra=fields | {"cause": one.error})
                else:
                    log.info("preloaded", extra=fields)

    def _library_lost(self) -> None:
        """The library is gone. Where the zygote is too, the next one starts another."""
        library = self.library
        library.modules = {}
        if self._is_stopping or not self.is_up.is_set():
            return
        pause_s: float | None = 0.0
        if self._is_unfit:
            self._is_unfit = False
        else:
            ready_s = time.monotonic() - library.ready_at if library.ready_at is not None else 0.0
            pause_s = self._library_restarts.pause_s(was_used=False, ready_s=ready_s)
            log.warning("the library process died", extra={"restart_in_s": pause_s})
        if self._library_restarts.failures or not self._imports:
            library.settled.set()  # nobody waits for one that keeps dying
        if pause_s is None:
            log.error("the library process keeps dying; workers start without preloaded imports")
        elif self._imports:
            self._own(self._relaunch_library(pause_s))

    async def _relaunch_library(self, pause_s: float) -> None:
        link = self._link
        await asyncio.sleep(pause_s)
        if link is self._link and self.is_up.is_set():
            await self._launch_library()

    # The zygote's own end

    def _lost(self) -> None:
        """Its end of the link is closed: it is ending, and is reaped in a moment."""
        self.is_up.clear()
        if not self._is_stopping and self._pid:
            asyncio.get_running_loop().call_later(END_LIMIT_S, self._insist, self._pid)

    def _insist(self, pid: int) -> None:
        if pid == self._pid and platform.is_own_child(pid):
            os.kill(pid, signal.SIGKILL)

    def _zygote_ended(self) -> None:
        """It is reaped. Its children are ours now."""
        pid, self._pid = self._pid, 0
        if self._link is not None:
            self._link.read_rest()
        self.is_up.clear()
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        if self._is_stopping:
            return
        log.error("the zygote died; a new one takes over", extra={"pid": pid})
        self.library.close_link()
        if self.library.process is not None:  # the next zygote has its own
            self.library.process.is_killed = True
        for process in list(self._processes.values()):
            if not platform.is_own_child(process.pid):
                self._ended(process.pid, None)  # it was reaped, and nobody was told
            elif process.is_killed:
                platform.signal_child(process.pid, signal.SIGKILL)
        self._own(self._relaunch())

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _reap_own_children(self) -> None:
        """Children of this process: the zygote, the fetcher, and what a dead zygote left us."""
        for pid, code in platform.dead_children():
            # While the dead leader is not reaped its group's number cannot be given anew.
            if pid in self._processes:
                platform.signal_group(pid, signal.SIGKILL)
            platform.reap(pid)
            if pid == self._pid:
                self._zygote_ended()
            elif pid in self._processes or self._starting:
                self._ended(pid, code, platform.oom_kills())


def _copies(fds: Sequence[int]) -> list[int]:
    """Descriptors of our own. Raises OSError, and leaves none, when there is no room for all."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        _close_all(copies)
        raise
    return copies


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
