"""How busy the machine is: the numbers of Multi Model Server's `system_metrics.py`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from mmserve.metrics.lines import HOST, metric_line

_MIB, _GIB = 1024**2, 1024**3

#: Name, unit, value.
Reading = tuple[str, str, float]


def hostname() -> str:
    """The host's name as metric lines have it."""
    return socket.gethostname() or "localhost"


class HostUsage:
    """Samples processor, disk and memory of the host.

    `CPUUtilization` is the share, 0 to 100, of all processors together since the sample before;
    the first counts from the making of this object. What the system does not tell is left out.

    Args:
        root: file system whose room is told, `/` as in Multi Model Server.
        proc: where Linux tells about itself; elsewhere psutil is asked.
    """

    def __init__(self, *, root: str = "/", proc: str = "/proc") -> None:
        self._root = root
        self._proc = Path(proc)
        self._times = self._processor_times()

    def sample(self) -> list[Reading]:
        """In the order in which Multi Model Server writes them."""
        return [*self._processor(), *self._disk(), *self._memory()]

    def lines(self, *, hostname: str, timestamp: int) -> list[str]:
        """A sample as metric lines; `timestamp` in epoch seconds."""
        return [
            metric_line(name, value, unit, HOST, hostname=hostname, timestamp=timestamp)
            for name, unit, value in self.sample()
        ]

    def _processor(self) -> Iterator[Reading]:
        before, now = self._times, self._processor_times()
        self._times = now
        if before is None or now is None:
            return
        busy, total = now[0] - before[0], now[1] - before[1]
        if total <= 0:
            return
        # Idle time may go back by a tick when a processor is taken away.
        share = min(1.0, max(0.0, busy / total))
        yield "CPUUtilization", "Percent", round(share * 100, 1)

    def _processor_times(self) -> tuple[float, float] | None:
        """Busy and all time, in units of no matter; None where it is not told."""
        try:
            with open(self._proc / "stat", "rb") as file:
                words = file.readline().split()
            # cpu user nice system idle iowait irq softirq steal; guest times are in user's.
            ticks = [float(word) for word in words[1:9]]
            idle = sum(ticks[3:5])
            return sum(ticks) - idle, sum(ticks)
        except (OSError, ValueError):
            if sys.platform == "linux":
                return None  # psutil would read the same file
        import psutil  # here, because it takes 20 ms and more

        times = psutil.cpu_times()
        return sum(times) - times.idle, sum(times)

    def _disk(self) -> Iterator[Reading]:
        try:
            room = os.statvfs(self._root)
        except OSError:
            return
        unit = room.f_frsize
        available, used = room.f_bavail * unit, (room.f_blocks - room.f_bfree) * unit
        # As `df`: what is reserved for root is neither.
        share = used / (used + available) if used + available else 0.0
        yield "DiskAvailable", "Gigabytes", round(available / _GIB, 3)
        yield "DiskUsage", "Gigabytes", round(used / _GIB, 3)
        yield "DiskUtilization", "Percent", round(share * 100, 1)

    def _memory(self) -> Iterator[Reading]:
        told = self._memory_bytes()
        if told is None:
            return
        total, available = told
        yield "MemoryAvailable", "Megabytes", round(available / _MIB, 3)
        yield "MemoryUsed", "Megabytes", round((total - available) / _MIB, 3)
        yield "MemoryUtilization", "Percent", round((total - available) / total * 100, 1)

    def _memory_bytes(self) -> tuple[int, int] | None:
        """All memory, and what could be had without swapping."""
        try:
            with open(self._proc / "meminfo", "rb") as file:
                rows = (line.split() for line in file)
                kib = {row[0]: int(row[1]) for row in rows if len(row) > 1}
            total = max(1, kib[b"MemTotal:"])
            available = min(total, kib[b"MemAvailable:"])
            return total * 1024, available * 1024
        except (OSError, ValueError, KeyError):
            if sys.platform == "linux":
                return None
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available
