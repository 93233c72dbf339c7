"""What is laid in before a load."""

from __future__ import annotations

import mmap
from pathlib import Path

from mmserve_loadtest.warm_memory import WarmMemory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_nearly_all_that_is_laid_in_is_free_for_others() -> None:
    size = 64 << 20
    with WarmMemory() as memory:
        before = resident_bytes()
        memory.lay_in(size)
        kept = resident_bytes() - before
        assert kept < size / 8
        memory.lay_in(size)  # the last one only is kept
        assert resident_bytes() - before < size / 8


def test_nothing_is_laid_in_where_nothing_is_asked_for() -> None:
    with WarmMemory() as memory:
        memory.lay_in(0)
