"""From a worker's pipe to lines."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable

from mmserve.logs.output import OutputLine, OutputReader

_READ_BYTES = 64 * 1024  # a pipe's usual capacity
#: Read in one turn of the event loop, some 0.2 ms; after a turn that reaches it the pipe rests.
#: A worker that prints without end so costs the front a few percent of a core, and is slowed to
#: 30 MB/s by its full pipe.
TURN_BYTES = 256 * 1024
REST_S = 0.008
#: Read at most when the worker is gone; what its own children still write is left unread.
LAST_BYTES = 1024 * 1024


class OutputPump:
    """Reads a pipe as long as there are writers. Owns `fd`, and closes it at its end.

    Args:
        loop: asyncio's or uvloop's; all calls are made in its thread.
        fd: the reading end; it is made non-blocking.
        on_lines: gets what came, at least one line.
        reader: cuts the lines.
        on_end: called once, when the descriptor is closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        on_lines: Callable[[list[OutputLine]], None],
        *,
        reader: OutputReader | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._loop, self._fd = loop, fd
        self._on_lines, self._on_end = on_lines, on_end
        self._reader = reader or OutputReader()
        self._rest: asyncio.TimerHandle | None = None
        self._notice: asyncio.TimerHandle | None = None
        os.set_blocking(fd, False)
        loop.add_reader(fd, self._on_readable)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def close(self) -> None:
        """Reads what is in the pipe and closes it, though somebody may still hold its other end.

        For when the worker is reaped: a process that it left behind must not cost a descriptor.
        """
        if self._fd >= 0:
            self._read(LAST_BYTES)
        if self._fd >= 0:
            self._end([])

    def _on_readable(self) -> None:
        if self._read(TURN_BYTES) >= TURN_BYTES and self._fd >= 0:
            self._loop.remove_reader(self._fd)
            self._rest = self._loop.call_later(REST_S, self._resume)

    def _resume(self) -> None:
        self._rest = None
        self._loop.add_reader(self._fd, self._on_readable)

    def _read(self, most_bytes: int) -> int:
        """Bytes read; at the end of the stream everything is closed."""
        done = 0
        lines: list[OutputLine] = []
        now = self._loop.time()
        while done < most_bytes:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""  # a terminal's way to say that the other end is closed
            if not data:
                self._end(lines)
                return done
            done += len(data)
            lines += self._reader.feed(data, now)
        if lines:
            self._on_lines(lines)
        self._arm()
        return done

    def _arm(self) -> None:
        """A notice about dropped lines comes also when nothing else does."""
        deadline = self._reader.next_deadline()
        if self._notice is None and deadline < math.inf and self._fd >= 0:
            self._notice = self._loop.call_at(deadline, self._on_deadline)

    def _on_deadline(self) -> None:
        self._notice = None
        if lines := self._reader.tick(self._loop.time()):
            self._on_lines(lines)
        self._arm()

    def _end(self, lines: list[OutputLine]) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        for timer in (self._rest, self._notice):
            if timer is not None:
                timer.cancel()
        if lines := lines + self._reader.end():
            self._on_lines(lines)
        if self._on_end is not None:
            self._on_end()
