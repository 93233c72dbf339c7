"""The disk, where it refuses: errors that name the path and the errno."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from mmserve.errors import StorageFailed


def storage_failed(action: str, path: str | Path, error: OSError) -> StorageFailed:
    """Says what could not be done: `Failed to write /tmp/x: No space left on device (ENOSPC, errno
    28).`"""
    number = error.errno or 0
    return StorageFailed(
        f"Failed to {action} {path}: {os.strerror(number) if number else error} "
        f"({errno.errorcode.get(number, 'unknown')}, errno {number})."
    )


def free_bytes(path: str | Path) -> int:
    """What an ordinary user may still write to the file system below `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def remove_tree(path: Path) -> None:
    """Removes a folder and all below it. What cannot be removed stays; nothing is raised."""
    shutil.rmtree(path, ignore_errors=True)
