"""Log files: opened, followed when somebody moves them, rolled, compressed, thrown away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

#: Rolling as in Multi Model Server's log4j2.xml: daily, or at 100 MB; five are kept.
ROLL_BYTES = 100 * 1024 * 1024
KEEP = 5

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_COMPRESS_STEP_BYTES = 256 * 1024  # a few milliseconds of zlib, without the GIL
_LOOK_INTERVAL_S = 1.0  # how often a rename by somebody else is looked for
_RETRY_ROLL_S = 60.0


class LogFile:
    """One file that lines are appended to, and what was rolled from it.

    It belongs to one thread. A path that is no regular file (a pipe, `/dev/stdout`) is written to
    and never rolled. When the file is renamed or removed by somebody else, as logrotate does, the
    next write goes to a new file of the old name.
    """

    #: Nothing can be written to it any more.
    is_dead = False

    def __init__(self, path: Path, *, roll_bytes: int = ROLL_BYTES, keep: int = KEEP) -> None:
        self.path, self._roll_bytes, self._keep = path, roll_bytes, keep
        self._fd = -1
        self._size = 0
        self._is_regular = False
        self._inode = (0, 0)
        self._day = (0, 0, 0)  # year, month, day that the lines are of
        self._day_ends = 0.0
        self._look_at = 0.0
        self._roll_at = 0.0  # no earlier, after a failure
        self._compressions: list[Iterator[None]] = []

    def __str__(self) -> str:
        return str(self.path)

    def open(self, now: float) -> None:
        """Creates folder and file where they are missing, and takes up what a crash left.

        Raises:
            OSError: it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open(now)
        if self._is_regular:
            with contextlib.suppress(OSError):
                for rolled in self._rolled():
                    if rolled.suffix == ".log":
                        self._compressions.append(_compress(rolled))

    def _open(self, now: float) -> None:
        # Without O_NONBLOCK the open of a named pipe waits for its reader.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        fd = os.open(self.path, flags, 0o644)
        os.set_blocking(fd, True)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        status = os.fstat(fd)
        self._is_regular = stat.S_ISREG(status.st_mode)
        self._inode = status.st_dev, status.st_ino
        self._size = status.st_size
        self._turn_day(status.st_mtime if self._size else now)
        self._look_at = now + _LOOK_INTERVAL_S

    def _turn_day(self, now: float) -> None:
        local = time.localtime(now)
        self._day = local.tm_year, local.tm_mon, local.tm_mday
        # mktime takes the 32nd of a month for the 1st of the next, and knows days of 23 hours.
        start_of_next = (local.tm_year, local.tm_mon, local.tm_mday + 1, 0, 0, 0, 0, 0, -1)
        self._day_ends = time.mktime(start_of_next)

    def prepare(self, now: float, size: int) -> None:
        """Called before `size` bytes of whole lines are written: follows, rolls. Never raises."""
        if not self._is_regular:
            return
        if now >= self._look_at:
            self._look_at = now + _LOOK_INTERVAL_S
            if self._was_moved():
                with contextlib.suppress(OSError):
                    self._open(now)
        if self._size == 0:
            if now >= self._day_ends:
                self._turn_day(now)
        elif (now >= self._day_ends or self._size + size > self._roll_bytes) and (
            now >= self._roll_at
        ):
            try:
                self._roll(now)
            except OSError:
                self._roll_at = now + _RETRY_ROLL_S

    def _was_moved(self) -> bool:
        try:
            status = self.path.stat()
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._inode

    def _roll(self, now: float) -> None:
        rolled = self._free_name()
        self.path.rename(rolled)
        self._open(now)
        self._compressions.append(_compress(rolled))
        for old in sorted(self._rolled(), key=_age)[: -self._keep]:
            old.unlink(missing_ok=True)

    def _free_name(self) -> Path:
        _, month, day = self._day
        stem = f"{self.path.stem}.{day:02d}-{_MONTHS[month - 1]}"
        taken = {path.name.removesuffix(".gz") for path in self._rolled()}
        name, number = f"{stem}.log", 1
        while name in taken:
            number += 1
            name = f"{stem}.{number}.log"
        return self.path.with_name(name)

    def _rolled(self) -> list[Path]:
        ours = re.compile(re.escape(self.path.stem) + r"\.\d\d-[A-Z][a-z]{2}(\.\d+)?\.log(\.gz)?")
        return [path for path in self.path.parent.iterdir() if ours.fullmatch(path.name)]

    def write(self, data: memoryview) -> int:
        """How much of it was written. Raises OSError."""
        written = os.write(self._fd, data)
        self._size += written
        return written

    def reopen(self, now: float) -> None:
        """Opens the path again; the open file stays where that fails. Raises OSError."""
        self._open(now)

    def work(self) -> bool:
        """A few milliseconds of compressing what was rolled; whether there is more to do."""
        if self._compressions:
            try:
                next(self._compressions[0])
            except (StopIteration, OSError):
                # After a failure the plain file stays, and counts as one of those kept.
                self._compressions.pop(0)
        return bool(self._compressions)

    def close(self) -> None:
        """What is not yet compressed will be by the next process that opens the file."""
        for compression in self._compressions:
            compression.close()  # type: ignore[attr-defined]  # these iterators are generators
        self._compressions.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _compress(source: Path) -> Iterator[None]:
    """`x.log` → `x.log.gz`, a step at a time; the plain file goes when the other is complete."""
    target = source.with_name(source.name + ".gz")
    part = target.with_name(target.name + ".part")
    with open(source, "rb") as plain:
        # Another server may log to the same folder; what it began is its own.
        fcntl.flock(plain, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(plain.fileno())
        if status.st_nlink == 0:
            return
        try:
            with open(part, "wb") as packed:
                packer = zlib.compressobj(4, zlib.DEFLATED, 31)  # 31: with a gzip header
                while block := plain.read(_COMPRESS_STEP_BYTES):
                    packed.write(packer.compress(block))
                    yield
                packed.write(packer.flush())
                packed.flush()
                os.utime(packed.fileno(), (status.st_atime, status.st_mtime))
            part.rename(target)
            source.unlink()
        finally:
            part.unlink(missing_ok=True)
