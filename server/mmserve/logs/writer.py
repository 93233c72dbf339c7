"""The thread that writes lines down."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mmserve.logs.backlog import Backlog

GATHER_S = 0.05  # lines wait this long for company: one wake-up and one write for many
RETRY_S = 1.0  # between attempts on a full disk
COMPRESS_PAUSE_S = 0.005  # between steps, which take about as long
_MOST_LINES = 4096  # a write; joining and encoding them holds the GIL


class Paper(Protocol):
    """What can be written on: a `LogFile` or a `Terminal`."""

    @property
    def is_dead(self) -> bool: ...
    def open(self, now: float) -> None: ...
    def prepare(self, now: float, size: int) -> None: ...
    def write(self, data: memoryview) -> int: ...
    def reopen(self, now: float) -> None: ...
    def work(self) -> bool: ...
    def close(self) -> None: ...


class Outlet:
    """A backlog and the paper it goes to.

    Args:
        form: makes a line of this paper's own out of a text, for notices.
        report: told when the paper stops and starts taking lines, with a text for the operator.
    """

    def __init__(
        self,
        backlog: Backlog,
        paper: Paper,
        form: Callable[[str], str],
        report: Callable[[str], None],
    ) -> None:
        self.backlog, self.paper = backlog, paper
        self._form, self._report = form, report
        self._rest = b""  # of a batch that was not written to its end
        self._dropped = 0  # told of
        self._why = ""  # of those that were dropped since
        self._failure: OSError | None = None

    @property
    def has_more(self) -> bool:
        if self.paper.is_dead:
            return False
        return bool(self.backlog) or bool(self._rest) or self.backlog.dropped != self._dropped

    @property
    def is_failing(self) -> bool:
        return self._failure is not None

    def drain(self) -> None:
        """Writes all there is, or up to the first error."""
        while self.has_more:
            if not self._rest:
                self._rest = self._batch().encode("utf-8", "backslashreplace")
                self.paper.prepare(time.time(), len(self._rest))
            done = 0
            view = memoryview(self._rest)
            try:
                while done < len(view):
                    done += self.paper.write(view[done:])
            except OSError as error:
                self._rest = bytes(view[done:])
                self._fail(error)
                return
            self._rest = b""
            self._recover()

    def _batch(self) -> str:
        text = self.backlog.take(_MOST_LINES)
        if missing := self.backlog.dropped - self._dropped:
            why = self._why or "they came faster than they could be written"
            text += self._form(f"{missing} lines are missing here: {why}")
            self._dropped += missing
            self._why = ""
        return text

    def _fail(self, error: OSError) -> None:
        if self.paper.is_dead:
            self.backlog.shut()
            self._rest = b""
            self._failure = None
            return
        self._why = error.strerror or str(error)
        if self._failure is None:
            self._report(
                f"cannot write {self.paper}: {self._why}; lines are kept as far as memory "
                "allows, then dropped"
            )
        self._failure = error

    def _recover(self) -> None:
        if self._failure is not None:
            self._failure = None
            self._report(f"{self.paper} can be written again")

    def give_up(self, bug: Exception) -> None:
        """Leaves out the batch at hand."""
        self._rest = b""
        self._report(f"lines for {self.paper} are lost: {bug!r}")

    def reopen(self) -> None:
        try:
            self.paper.reopen(time.time())
        except OSError as error:
            self._report(f"cannot reopen {self.paper}: {error.strerror}; the old file stays")


class Writer:
    """One thread for some outlets. It sleeps without a timeout while there is nothing to do.

    Lines are seen at most `GATHER_S` after they were put. `start` and `close` are called once.
    """

    def __init__(self, name: str, outlets: Sequence[Outlet]) -> None:
        self._outlets = outlets
        self._bell = threading.Lock()
        self._bell.acquire()
        self._is_closing = False
        self._must_reopen = False
        self._flushes: list[threading.Event] = []
        # A daemon: a disk or terminal that hangs must not keep the server from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        for outlet in outlets:
            outlet.backlog.wake = self._ring

    def start(self) -> None:
        self._thread.start()

    def _ring(self) -> None:
        for outlet in self._outlets:
            outlet.backlog.is_asleep = False
        with contextlib.suppress(RuntimeError):  # rung already, and not yet heard
            self._bell.release()

    def reopen(self) -> None:
        """Opens all files again, soon."""
        self._must_reopen = True
        self._ring()

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was put before is written. False: it took longer, or cannot be."""
        if not self._thread.is_alive():
            return False
        done = threading.Event()
        self._flushes.append(done)
        self._ring()
        return done.wait(timeout_s) and not any(o.is_failing for o in self._outlets)

    def close(self, timeout_s: float) -> None:
        """Writes what waits and ends the thread; after `timeout_s` it is left where it hangs."""
        self._is_closing = True
        self._ring()
        self._thread.join(timeout_s)
        for outlet in self._outlets:
            outlet.backlog.shut()

    # The thread's own

    def _run(self) -> None:
        pause_s = 0.0
        while not self._is_closing:
            self._wait(pause_s)
            pause_s = self._round()
        self._round()
        for outlet in self._outlets:
            outlet.paper.close()

    def _wait(self, pause_s: float) -> None:
        if pause_s:
            self._bell.acquire(timeout=pause_s)
            return
        for outlet in self._outlets:
            outlet.backlog.is_asleep = True
        # From here on a `put` rings. What was put just before is seen now.
        if not self._has_work():
            self._bell.acquire()
            if not self._is_closing and not self._flushes:
                self._bell.acquire(timeout=GATHER_S)
        for outlet in self._outlets:
            outlet.backlog.is_asleep = False

    def _has_work(self) -> bool:
        return (
            self._is_closing
            or self._must_reopen
            or bool(self._flushes)
            or any(outlet.has_more for outlet in self._outlets)
        )

    def _round(self) -> float:
        """Writes; seconds until the next round, 0 for when somebody rings."""
        flushes = self._flushes[:]
        if self._must_reopen:
            self._must_reopen = False
            for outlet in self._outlets:
                outlet.reopen()
        wrote = False
        for outlet in self._outlets:
            wrote = wrote or outlet.has_more
            try:
                outlet.drain()
            except Exception as bug:  # it costs these lines, and not all that come after
                outlet.give_up(bug)
        for done in flushes:
            self._flushes.remove(done)
            done.set()
        if any(outlet.paper.work() for outlet in self._outlets):
            return COMPRESS_PAUSE_S
        if any(outlet.is_failing for outlet in self._outlets):
            return RETRY_S
        return GATHER_S if wrote else 0.0
