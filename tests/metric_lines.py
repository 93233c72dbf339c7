"""Metric lines, taken apart again."""

from __future__ import annotations

import re
from typing import NamedTuple

_DIMENSIONS = r"(?:[^|,:\x00-\x1f]+:[^|,\x00-\x1f]*(?:,[^|,:\x00-\x1f]+:[^|,\x00-\x1f]*)*)?"
_LOGGED = re.compile(
    rf"([A-Za-z0-9_-]+)\.(\w+):([^|\s]+)\|#({_DIMENSIONS})\|#hostname:([^|,\s]*)"
    r"(?:,requestID:([^|]*))?,timestamp:(\d+)",
    re.ASCII,
)


class Metric(NamedTuple):
    """A metric line, taken apart. `value` is the text of a number, or of whatever was logged."""

    name: str
    unit: str
    value: str
    dimensions: tuple[tuple[str, str], ...]
    hostname: str
    timestamp: int
    request_id: str


def parse_line(text: str) -> Metric | None:
    """The line of a log without its time of writing; None where it is not one."""
    found = _LOGGED.fullmatch(text)
    if found is None:
        return None
    name, unit, value, listed, hostname, request_id, timestamp = found.groups()
    dimensions = tuple(
        (pair.partition(":")[0], pair.partition(":")[2]) for pair in listed.split(",") if pair
    )
    return Metric(name, unit, value, dimensions, hostname, int(timestamp), request_id or "")
