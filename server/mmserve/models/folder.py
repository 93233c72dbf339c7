"""A folder of ours that says whether its owner still lives.

Its owner holds a lock on the file `lock` in it for as long as it lives, however it ends. A folder
whose lock can be taken is stale, and whoever takes the lock may remove it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from mmserve.models.disk import remove_tree

_LOCK = "lock"
_NAME = re.compile(r"mmserve-\d+-\w+", re.ASCII)


class Folder:
    """A folder that is ours until `close`."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path, self._lock_fd = path, lock_fd

    @classmethod
    def make(cls, parent: Path) -> Self:
        """A new one, `mmserve-PID-…`, below `parent`. Raises OSError."""
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = Path(tempfile.mkdtemp(prefix=f"mmserve-{os.getpid()}-", dir=parent))
            try:
                fd = _take(path, os.O_CREAT)
            except OSError:
                remove_tree(path)
                raise
            if fd is not None:  # else a starting server took it for a stale one just now
                return cls(path, fd)

    def close(self) -> None:
        """Removes it and all in it. What cannot be removed stays, and is stale from now on."""
        remove_tree(self.path)
        os.close(self._lock_fd)


def stale(parent: Path) -> list[Path]:
    """Folders below `parent` whose owner is dead, of this user only."""
    found = []
    for path in _ours(parent):
        with contextlib.suppress(OSError):
            fd = _take(path)
            if fd is not None:
                os.close(fd)
                found.append(path)
    return found


def clear(path: Path) -> bool:
    """Removes a stale folder. False: its owner lives, or it is gone."""
    try:
        fd = _take(path)
    except OSError:
        return False
    if fd is None:
        return False
    try:
        remove_tree(path)
    finally:
        os.close(fd)
    return True


def _ours(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if (
                    _NAME.fullmatch(entry.name)
                    and entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
                ):
                    yield Path(entry.path)


def _take(path: Path, flags: int = 0) -> int | None:
    """A descriptor that holds the folder's lock; None where another has it.

    Raises OSError: there is no such folder or lock, or it cannot be made.
    """
    lock = path / _LOCK
    fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Not the lock of a folder that somebody removed between the two calls.
        if os.path.samestat(os.fstat(fd), lock.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
