"""Standard output as a place for lines."""

from __future__ import annotations

import errno
import os
import select

_GONE = {errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO}
_PATIENCE_MS = 200


class Terminal:
    """A file descriptor of somebody else's. It is not closed, and its flags stay as they are."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        #: The reader has left; there will be no other.
        self.is_dead = False

    def __str__(self) -> str:
        return "standard output"

    def open(self, now: float) -> None:
        """Raises OSError where the descriptor is not open."""
        os.fstat(self._fd)

    def prepare(self, now: float, size: int) -> None:
        """Nothing to prepare."""

    def write(self, data: memoryview) -> int:
        """How much of it was written. Raises OSError, BlockingIOError after some patience."""
        try:
            return os.write(self._fd, data)
        except BlockingIOError:
            # The other users of the descriptor made it non-blocking.
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT)
            poll.poll(_PATIENCE_MS)
            return os.write(self._fd, data)
        except OSError as error:
            self.is_dead = error.errno in _GONE
            raise

    def reopen(self, now: float) -> None:
        """It has no path to be opened again."""

    def work(self) -> bool:
        return False

    def close(self) -> None:
        """It is not ours."""
