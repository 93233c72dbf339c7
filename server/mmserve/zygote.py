"""The zygote: the small process that starts every worker, signals it, and reaps it.

`python -I -m mmserve.zygote --control FD --liveness FD`

It has no thread, holds no model and runs nobody's code, so that it always answers and a fork of it
is always safe. The heavy libraries live in a child of it, the *library*, which forks workers that
have them. Those, like the workers that a *template* forks, are orphaned at once and come to the
zygote, which is their subreaper: whatever its origin, a worker's end is seen here and only here.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

from mmserve import platform
from mmserve.runtime import worker as runtime
from mmserve.runtime.process import leave, take_own_threads
from mmserve.wire.channel import Channel
from mmserve.wire.control import (
    BlockingLink,
    Environ,
    Exited,
    Import,
    LibraryReady,
    LibraryUnfit,
    Signal,
    Spawn,
    Start,
    Started,
    StartFailed,
    ToLibrary,
    ToZygote,
    Up,
)

#: Read once, by native libraries when they load: a second thread in the library would make every
#: fork of it a gamble.
SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_HANDLED_SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="mmserve.zygote")
    parser.add_argument("--control", type=int, required=True, metavar="FD")
    parser.add_argument("--liveness", type=int, required=True, metavar="FD")
    given = parser.parse_args(arguments)
    platform.become_subreaper()
    gc.collect()
    gc.freeze()  # forks share these pages: the collector need not touch them
    os.set_inheritable(given.liveness, False)
    control = socket.socket(fileno=given.control)
    control.set_inheritable(False)
    with _ChildSignals() as children:
        Zygote(BlockingLink(control, ToZygote), given.liveness, children).run()


class _ChildSignals:
    """SIGCHLD as a readable descriptor. The terminal's signals are the front's business."""

    def __enter__(self) -> _ChildSignals:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def fileno(self) -> int:
        return self._read

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def forget(self) -> None:
        """In a forked child: back to the defaults."""
        signal.set_wakeup_fd(-1)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)


class Zygote:
    def __init__(self, link: BlockingLink, liveness_fd: int, children: _ChildSignals) -> None:
        self._link, self._liveness_fd, self._children = link, liveness_fd, children

    def run(self) -> None:
        """Until the front is gone; then nothing that was started here is left."""
        poll = select.poll()
        poll.register(self._link.socket, select.POLLIN)
        poll.register(self._children, select.POLLIN)
        try:
            self._link.send(Up(_top_level_modules()))
            while True:
                for fd, _ in poll.poll():
                    if fd == self._children.fileno():
                        self._children.drain()
                    elif not self._obey():
                        return
                self._report_the_dead()
        finally:
            _kill_all_descendants()

    def _obey(self) -> bool:
        is_open = self._link.receive()
        for message, fds in self._link.messages():
            if isinstance(message, Start):
                self._start(message, fds)
            elif isinstance(message, Signal) and platform.is_own_child(message.pid):
                platform.signal_child(message.pid, message.number)
        return is_open

    def _start(self, order: Start, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._link.send(StartFailed(order.ticket, f"fork: {error.strerror}", True))
        else:
            if pid == 0:
                self._become(order, fds)
            self._link.send(Started(order.ticket, pid))
        finally:
            for fd in fds:
                os.close(fd)

    def _become(self, order: Start, fds: list[int]) -> None:
        """The child's side of a start. `_last_words` ends it: it never returns into the loop."""
        with _last_words():
            self._children.forget()
            self._link.let_go()
            wire, out, err, *control = fds
            alarm = _settle(self._liveness_fd, out, err, order.environ)
            match order.kind:
                case "fork":
                    os.close(self._liveness_fd)
                    runtime.run_worker(wire, start="fork")
                case "exec":
                    _exec_worker(order.interpreter, wire, alarm)
                case "library":
                    os.close(wire)
                    serve_as_library(_link(control), self._liveness_fd, order.imports)
                case "template":
                    serve_as_template(wire, _link(control), self._liveness_fd)

    def _report_the_dead(self) -> None:
        for pid, code in platform.dead_children():
            # While the dead leader is not reaped its group's number cannot be given anew.
            platform.signal_group(pid, signal.SIGKILL)
            platform.reap(pid)
            with contextlib.suppress(OSError):  # the front is gone: `run` will see that
                self._link.send(Exited(pid, code, platform.oom_kills()))


# Processes that fork workers for others


def serve_as_library(link: BlockingLink, liveness_fd: int, modules: list[str]) -> None:
    """Imports the modules, then forks for each Spawn, until the front is gone."""
    imports = []
    for name in modules:
        began = time.monotonic()
        error = _import(name)
        threads = platform.native_threads()
        if threads > 1:
            link.send(LibraryUnfit(name, threads))
            return
        imports.append(Import(name, time.monotonic() - began, platform.rss_bytes(), error))
    _keep_finalizers_from_forks()
    gc.collect()
    gc.freeze()
    link.send(LibraryReady(imports, _top_level_modules()))
    for _ in platform.into_huge_pages():
        if select.select([link.socket], [], [], 0)[0]:
            break  # who wants a worker does not wait; from the first fork on memory is shared
    while link.receive():
        for order, fds in link.messages():
            if isinstance(order, Spawn):
                _spawn(link, liveness_fd, order, fds, _worker_or_template)


def _worker_or_template(wire: int, control: list[int], liveness_fd: int) -> None:
    if control:
        serve_as_template(wire, _link(control), liveness_fd)
    else:
        os.close(liveness_fd)
        runtime.run_worker(wire, start="fork")


def serve_as_template(wire_fd: int, link: BlockingLink, liveness_fd: int) -> None:
    """Loads the model that the wire names, then forks workers that have it.

    A batch that comes over the template's own wire makes it an ordinary worker: so the front does
    with a model that cannot be forked.
    """
    channel = Channel(socket.socket(fileno=wire_fd))
    model = runtime.introduce(channel, start="template")
    if model is None:
        return
    gc.collect()
    gc.freeze()

    def work(wire: int, _: list[int], liveness_fd: int) -> None:
        os.close(liveness_fd)
        channel.socket.close()
        runtime.run_loaded(wire, model)

    poll = select.poll()
    poll.register(link.socket, select.POLLIN)
    poll.register(channel.socket, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if channel.socket.fileno() in ready:
            take_own_threads()
            runtime.serve_batches(channel, model)
            leave(0)
        if not link.receive():
            return
        for order, fds in link.messages():
            if isinstance(order, Spawn):
                _spawn(link, liveness_fd, order, fds, work)


def _spawn(
    link: BlockingLink,
    liveness_fd: int,
    order: Spawn,
    fds: list[int],
    work: Callable[[int, list[int], int], object],
) -> None:
    """Forks a process that the zygote adopts: its parent, a fork of ours, ends at once."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        middle = os.fork()
        if middle == 0:
            with _last_words():
                pid = os.fork()
                if pid:
                    os.write(write, pid.to_bytes(4, "little"))
                    os._exit(0)
                os.close(read)
                os.close(write)
                link.let_go()
                wire, out, err, *control = fds
                _settle(liveness_fd, out, err, order.environ)
                work(wire, control, liveness_fd)
        os.close(write)
        write = -1
        told = os.read(read, 4)
        os.waitpid(middle, 0)
        if len(told) < 4:
            raise OSError(0, "the forked process could not fork")
        link.send(Started(order.ticket, int.from_bytes(told, "little")))
    except OSError as error:
        link.send(StartFailed(order.ticket, f"fork: {error.strerror}", True))
    finally:
        for fd in (read, write, *fds):
            if fd >= 0:
                os.close(fd)


# Small parts


def _settle(liveness_fd: int, out: int, err: int, environ: Environ) -> int | None:
    """Own session, own output, own environment; killed by the kernel when the front ends.

    Returns:
        The descriptor that makes it so; it must outlive an exec.
    """
    os.setsid()
    alarm = platform.kill_group_when_closed(liveness_fd)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(fd, target)
        if fd > 2:
            os.close(fd)
    os.environb.clear()
    os.environb.update(environ)
    return alarm


def _exec_worker(interpreter: list[str], wire: int, alarm: int | None) -> NoReturn:
    for fd in (wire, alarm):
        if fd is not None:
            os.set_inheritable(fd, True)
    words = [*interpreter, "-m", "mmserve.runtime", "--fd", str(wire)]
    os.execve(words[0], words, dict(os.environ))


def _link(control: list[int]) -> BlockingLink:
    return BlockingLink(socket.socket(fileno=control[0]), ToLibrary)


@contextlib.contextmanager
def _last_words() -> Iterator[None]:
    """A forked child ends here, whatever happens; its trace goes to its own stderr."""
    code = 1
    try:
        yield
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _import(name: str) -> str:
    """Imports a module and, where the name says so, more of it. "" or why not.

    `module`; `module:attribute`, since lazy packages load on access; `module:function(text)`, which
    is called with the text, since some modules build their tables on the first call.
    """
    module, _, attribute = name.partition(":")
    function, is_call, argument = attribute.partition("(")
    try:
        loaded = importlib.import_module(module)
        if attribute:
            found = getattr(loaded, function)
            if is_call:
                found(argument.removesuffix(")"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _keep_finalizers_from_forks() -> None:
    """What the imports want done at the end of a process is none of a worker's business.

    PyTorch takes its operators out of their tables one by one, for 50 ms. A finalizer that the
    model's own code makes still runs.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


def _top_level_modules() -> dict[str, str]:
    return {
        name: getattr(module, "__file__", None) or ""
        for name, module in sys.modules.items()
        if "." not in name and name != "__main__"
    }


def _kill_all_descendants() -> None:
    """Descendants in sessions of their own too: they are our children once orphaned."""
    while pids := platform.descendants(os.getpid()):
        for pid in pids:
            platform.signal_group(pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
