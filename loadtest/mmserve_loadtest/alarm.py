"""An alarm clock for the event loop, finer than its own timers."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_CLOCK_MONOTONIC = 1


class _Spec(ctypes.Structure):
    """struct itimerspec, see timerfd_create(2)."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Alarm:
    """Calls back at an instant of `time.monotonic_ns()`.

    Event loops, uvloop's too, wake on whole milliseconds. An open loop would send late by half a
    millisecond on average and show it as latency of the server. On Linux a timerfd is used, which
    is late by some ten microseconds; elsewhere the loop's timer.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop, self._ring = asyncio.get_running_loop(), ring
        self._handle: asyncio.TimerHandle | None = None
        self._spec = _Spec(0, 0, 0, 0)
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._expired)

    def set(self, at_ns: int) -> None:
        """Rings once at `at_ns`, at once when that has passed. A later call replaces this one."""
        if self._fd >= 0:
            self._spec.at_s, self._spec.at_ns = divmod(max(at_ns, 1), 1_000_000_000)
            self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(self._spec), None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(at_ns / 1e9, self._ring)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._handle is not None:
            self._handle.cancel()

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # it was set anew before the loop came here
            return
        self._ring()
