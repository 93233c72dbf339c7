"""Free memory that is really there.

A virtual machine may give free memory back to its host (free page reporting of the balloon driver)
and then waits seconds per GB for what it uses again. Whoever starts a model in such memory measures
the host. So a benchmark lays in memory for the server that comes next.
"""

from __future__ import annotations

import mmap
import os

_PAGE = mmap.PAGESIZE
#: One page in so many is kept: given back are whole blocks of 2 MB, and so none of them is free.
_KEPT_IN = 256


class WarmMemory:
    """Keeps what it has laid in last from being given back, for as long as it lives."""

    def __init__(self) -> None:
        self._kept: mmap.mmap | None = None

    def lay_in(self, size: int) -> None:
        """Touches so many bytes, or half of what is free, and frees nearly all of them.

        Half of it is freed as whole blocks, which files are written to, and which the next seconds
        may see given back; the other half in pieces, which processes allocate, and which stay.
        """
        half = min(size, os.sysconf("SC_AVPHYS_PAGES") // 2 * _PAGE) // 2
        if half < _PAGE:
            return
        in_pieces = _touched(half, "MADV_NOHUGEPAGE")
        step = _KEPT_IN * _PAGE
        for start in range(0, half, step):
            length = min(step, half - start) // _PAGE * _PAGE - _PAGE
            if length > 0:
                in_pieces.madvise(mmap.MADV_DONTNEED, start + _PAGE, length)
        self.close()
        self._kept = in_pieces
        _touched(half, "MADV_HUGEPAGE").close()

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def __enter__(self) -> WarmMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _touched(size: int, advice: str) -> mmap.mmap:
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        block.madvise(getattr(mmap, advice))
    block[::_PAGE] = b"\1" * len(range(0, size, _PAGE))
    return block
