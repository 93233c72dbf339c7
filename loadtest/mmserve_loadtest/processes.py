"""What /proc tells about the processes of one server. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

#: Variable that marks every process of one server, however far it has gone from its parent.
MARK = "MMSERVE_BENCH_RUN"
PROC = Path("/proc")


def of_run(run: str, root: int) -> set[int]:
    """Living processes that carry the mark of `run`, and descendants of `root`."""
    mark, parents, found = f"{MARK}={run}".encode(), dict[int, int](), set[int]()
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            stat = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            if stat[0] in b"ZX":
                continue
            parents[pid] = int(stat[1])
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    found |= {root} & parents.keys()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def private_dirty_bytes(pid: int) -> int:
    """Memory that would be free again if this process alone ended; 0 when it has ended.

    Source: proc_pid_smaps(5), Private_Dirty.
    """
    with contextlib.suppress(OSError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) * 1024
    return 0
