"""What we ask of the operating system beyond Python's `os`; each with a plain fallback.

Linux gives all of it. Elsewhere a function does nothing and says so by its return value, and the
server works with less: orphans are not adopted, a killed front is noticed by end-of-file only.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import functools
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

IS_LINUX = sys.platform == "linux"

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_F_SETSIG = 10  # asm-generic/fcntl.h; Python's fcntl does not name it
_MADV_COLLAPSE = 25  # asm-generic/mman-common.h
_HUGE_PAGE = 2 << 20  # where a huge page is larger, as on some ARM kernels, nothing is moved
_MOST_FAILURES = 16


# Processes


def become_subreaper() -> bool:
    """Orphaned descendants become our children, so that we can reap them. False: cannot."""
    if not IS_LINUX:
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def kill_group_when_closed(pipe_fd: int) -> int | None:
    """Has the kernel kill our whole process group once the pipe's write end is closed.

    It works while every thread of ours spins in C, and for children that ignore SIGTERM, since
    nobody has to look: the signal that `O_ASYNC` sends on hang-up is set to SIGKILL.

    Args:
        pipe_fd: read end of a pipe whose only write end is the owner's. Stays open.

    Returns:
        A new descriptor that must stay open; None where the platform has no such thing.
    """
    if not IS_LINUX:
        return None
    # Owner and signal belong to the open file description, which a fork shares: open it anew.
    own = os.open(f"/proc/self/fd/{pipe_fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(own, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe_fd, 0)  # hang-up is always told
    if poll.poll(0):  # it was closed before; nobody signals that any more
        os.killpg(os.getpgrp(), signal.SIGKILL)
    return own


def native_threads() -> int:
    """Threads of this process that the kernel knows; 1 where it cannot tell."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 1


def children(pid: int) -> list[int]:
    """Direct children of a process, zombies included; [] where it cannot tell."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, nearest first."""
    found, level = [], [pid]
    while level := [child for parent in level for child in children(parent)]:
        found += level
    return found


def signal_group(pid: int, number: int) -> bool:
    """Signals the process group that `pid` leads. False: it is gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def signal_child(pid: int, number: int) -> None:
    """Signals a child of ours that was not reaped, and the process group that it leads.

    A child that was forked only just now leads none yet.
    """
    if not signal_group(pid, number):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def dead_children() -> Iterator[tuple[int, int]]:
    """Children that have ended and are not reaped yet, as (pid, code); reap each with `reap`.

    The code is the exit status, or minus the number of the signal that ended it.
    """
    seen: set[int] = set()
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if info is None or info.si_pid in seen:
            return
        seen.add(info.si_pid)
        exited = info.si_code == os.CLD_EXITED
        yield info.si_pid, info.si_status if exited else -info.si_status


def reap(pid: int) -> None:
    """Takes an ended child out of the process table."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def is_own_child(pid: int) -> bool:
    """Whether `pid` is a child of ours that was not reaped, so that a signal hits nobody else."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def raise_open_files(most: int = 65_536) -> None:
    """Raises the soft limit of open files: a worker costs three, a connection one.

    Children inherit it, as those of a Java virtual machine do.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_standard_streams() -> None:
    """Opens /dev/null where descriptor 0, 1 or 2 is closed: the next file would be taken for it."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it is the lowest free one


# Descriptors over a socket


def send_with_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> int:
    """Like `send`; the descriptors travel with the first byte."""
    ancillary = []
    if fds:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
    return sock.sendmsg([data], ancillary)


def receive_with_fds(sock: socket.socket, size: int, most_fds: int = 16) -> tuple[bytes, list[int]]:
    """Like `recv`, with the descriptors that came along (close-on-exec)."""
    room = socket.CMSG_LEN(most_fds * array.array("i").itemsize)
    flags = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
    data, ancillary, _, _ = sock.recvmsg(size, room, flags)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


# Memory


def rss_bytes() -> int:
    """Resident memory of this process; 0 where it cannot tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def into_huge_pages() -> Iterator[None]:
    """Moves this process's private memory into huge pages, one at each step, where that goes.

    A fork copies one entry for a huge page in place of 512, and its exit has as many fewer to
    drop; memory is still unshared by small pages. Steps take up to some milliseconds. Not to be
    done while children share the memory: they would share it no more.

    Source: madvise(2), MADV_COLLAPSE, since Linux 6.1.
    """
    if not IS_LINUX:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    failures = 0
    for start, end in _private_memory():
        for at in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
            # What was never touched cannot be moved; where nothing can, the kernel is too old.
            failures = 0 if madvise(at, _HUGE_PAGE, _MADV_COLLAPSE) == 0 else failures + 1
            if failures > _MOST_FAILURES:
                return
            yield


def _private_memory() -> Iterator[tuple[int, int]]:
    """Addresses of the heap and of anonymous mappings that can be written."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            where, access, _, _, inode, *name = line.split(maxsplit=5)
            if access == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
                start, _, end = where.partition("-")
                yield int(start, 16), int(end, 16)


def oom_kills() -> int:
    """How often the out-of-memory killer has struck in our cgroup, else on this machine.

    Sources: cgroup v2 `memory.events`, cgroup v1 `memory.oom_control`, `/proc/vmstat`; 0 where
    none can be read.
    """
    for path in _oom_counters():
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    return 0


@functools.cache
def _oom_counters() -> list[Path]:
    groups = control_groups("memory")
    places = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    return [place for place in [*places, Path("/proc/vmstat")] if place.exists()]


def process_limit() -> int | None:
    """How many processes this one and its descendants may be, at most; None without a limit.

    Sources: `pids.max` of the control groups around us, and RLIMIT_NPROC, which root ignores.
    """
    limits = []
    for group in control_groups("pids"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int((group / "pids.max").read_text()))
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
            limits.append(soft)
    return min(limits, default=None)


# Processes of others


class OtherProcess:
    """A process that is not our child, held by a pidfd: its pid cannot come to mean another.

    Where there are no pidfds it is known by its pid alone.

    Raises:
        ProcessLookupError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = None
        if IS_LINUX:
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                raise
            except OSError:  # an old kernel, or a sandbox that forbids it
                pass
        if self._fd is None:
            with contextlib.suppress(PermissionError):  # it is there, and not ours
                os.kill(pid, 0)

    def command_line(self) -> list[str]:
        """Its arguments; [] once it has ended, and where it cannot be read."""
        if (data := self._read("cmdline")) is not None:
            words = os.fsdecode(data).split("\0")[:-1]
            return [] if self.has_ended() else words
        import psutil  # macOS; costs 20 ms

        try:
            return list(psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return []

    def environ(self) -> dict[str, str]:
        """The environment it was started with; {} where it cannot be read."""
        entries = os.fsdecode(self._read("environ") or b"").split("\0")
        return dict(entry.split("=", 1) for entry in entries if "=" in entry)

    def cwd(self) -> str:
        """Its current directory; "/" where it cannot be read."""
        try:
            return str(Path(f"/proc/{self.pid}/cwd").readlink())
        except OSError:
            return "/"

    def signal(self, number: int) -> None:
        """Raises ProcessLookupError, PermissionError."""
        if self._fd is None:
            os.kill(self.pid, number)
        else:
            signal.pidfd_send_signal(self._fd, number)

    def wait(self, limit_s: float) -> bool:
        """Waits for its end. False: it lives on after `limit_s` seconds."""
        if self._fd is not None:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            return bool(poll.poll(max(0.0, limit_s) * 1000))
        deadline = time.monotonic() + limit_s
        while self._is_there():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)  # there is nothing to wait on
        return True

    def has_ended(self) -> bool:
        return self.wait(0)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_there(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _read(self, name: str) -> bytes | None:
        try:
            return Path(f"/proc/{self.pid}/{name}").read_bytes()
        except OSError:
            return b"" if IS_LINUX else None


# CPUs


def cpu_count() -> tuple[int, str]:
    """CPUs this process may use, at least 1, and what says so.

    The smaller of what the scheduler lets us run on and, rounded up, the quota of the control
    groups around us.
    """
    try:
        count, source = len(os.sched_getaffinity(0)), "affinity"
    except AttributeError:  # macOS
        count, source = os.cpu_count() or 1, "processors"
    quota = cpu_quota()
    if quota is not None and (whole := max(1, math.ceil(quota))) < count:
        return whole, f"cgroup quota of {quota:g}"
    return count, source


def cpu_quota(proc: Path = Path("/proc/self")) -> float | None:
    """CPUs that the tightest control group around a process allows; None: no limit is known."""
    return min(filter(None, map(_cpu_quota_of, control_groups("cpu", proc))), default=None)


def _cpu_quota_of(group: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # version 2, 1
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            return quota / period if quota > 0 and period > 0 else None  # version 1: -1 is "none"
    return None  # version 2: "max" is no number


# Control groups


def control_groups(controller: str, proc: Path = Path("/proc/self")) -> list[Path]:
    """Directories of the control groups around a process, its own first; [] where there are none.

    Both versions, since a machine may have both; where the process sees but its container's part
    of the tree, that part.

    Args:
        controller: of version 1, for example "cpu" or "memory".
        proc: the process.

    Source: cgroups(7), proc_pid_cgroup(5), proc_pid_mountinfo(5).
    """
    try:
        memberships = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError:
        return []
    paths: dict[str, str] = {}  # "" for version 2, else a controller → path of our group
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)

    found: list[Path] = []
    for line in mounts:
        left, _, right = line.partition(" - ")
        root, mount_point = left.split()[3:5]
        kind, _, options = [*right.split(), "", ""][:3]
        if kind == "cgroup2":
            name = ""
        elif kind == "cgroup" and controller in options.split(","):
            name = controller
        else:
            continue
        if name not in paths:
            continue
        top = Path(mount_point.replace("\\040", " "))
        try:
            below = Path(paths[name]).relative_to(root)
        except ValueError:  # our group is not below what is mounted here: it is what is mounted
            below = Path()
        if ".." in below.parts:
            below = Path()
        group = top / below
        found += [group, *(parent for parent in group.parents if parent.is_relative_to(top))]
    return found
