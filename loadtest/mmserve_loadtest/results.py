"""JSONL results: one line per measurement, with what it was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from mmserve_loadtest.load import LOOP


def machine() -> dict[str, object]:
    """What a figure depends on: processor, cores that may be used, memory in bytes, kernel."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Of the generator. Those of the servers stand with the servers."""
    return {
        "python": platform.python_version(),
        "mmserve-bench": _version("mmserve"),
        "hdrhistogram": _version("hdrhistogram"),
        "loop": LOOP,
    }


def line(kind: str, fields: Mapping[str, Any], *, at: datetime) -> bytes:
    """One line, newline included. `fields` are what msgspec can encode."""
    head = {"kind": kind, "at": at.isoformat(timespec="milliseconds")}
    return msgspec.json.encode(head | dict(fields), order=None) + b"\n"


class Results:
    """Appends lines to a file; without a path, to nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._about = {"machine": machine(), "versions": versions()}

    def add(self, kind: str, **fields: object) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(line(kind, fields | self._about, at=datetime.now(UTC)))


def table(rows: Iterable[Iterable[str]], *, header: Iterable[str]) -> str:
    """A Markdown table."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (text.partition(":")[2].strip() for text in lines if text.startswith("model name"))
    return next(names, platform.machine())


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"
