"""Metric lines: StatsD-like text, as Multi Model Server writes it.

In a log, `{Name}.{Unit}:{value}|#{Dimension}:{value}[,…]|#hostname:{host}[,requestID:{id}],
timestamp:{epoch seconds}`. On a worker's standard output, behind `[METRICS]`, host and time have no
keys: `|#hostname:{host},{epoch seconds}[,{request ids}]` (`Metric.java`, `metric.py` of 1.1.11).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

Dimensions = Sequence[tuple[str, str]]

#: Of everything that is measured of the machine or of the server as a whole.
HOST: Dimensions = (("Level", "Host"),)

#: A metric without a unit; CloudWatch's word for it.
NO_UNIT = "None"

_NOT_NAME = re.compile(r"[^A-Za-z0-9_-]")
_NOT_UNIT = re.compile(r"[^A-Za-z0-9_]")
# What ends a field, and what ends a line.
_NOT_VALUE = re.compile(r"[|,#\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NOT_ID = re.compile(r"[|#\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NOT_NUMBER = re.compile(r"[^0-9A-Za-z.+-]")

_NUMBER = r"[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?"
_DIMENSIONS = r"(?:[^|,:\x00-\x1f]+:[^|,\x00-\x1f]*(?:,[^|,:\x00-\x1f]+:[^|,\x00-\x1f]*)*)?"
_PRINTED = re.compile(
    rf"\[METRICS\](\w+\.\w+:{_NUMBER}\|#{_DIMENSIONS}\|#hostname:[^|,\s]*)"
    r",(\d{1,18})(?:,([^|\s]*))?",
    re.ASCII,
)


def metric_line(
    name: str,
    value: float | str,
    unit: str | None,
    dimensions: Dimensions = (),
    *,
    hostname: str,
    timestamp: int,
    request_id: str = "",
) -> str:
    """A finished line. What cannot stand in its field becomes `_`; no unit becomes `None`.

    Args:
        timestamp: epoch seconds.
        request_id: one id, or those of a batch with commas between; "" for none.
    """
    listed = ",".join(
        f"{_plain(_NOT_VALUE, key).replace(':', '_')}:{_plain(_NOT_VALUE, text)}"
        for key, text in dimensions
    )
    asked = f",requestID:{_NOT_ID.sub('_', request_id)}" if request_id else ""
    return (
        f"{_plain(_NOT_NAME, name)}.{_plain(_NOT_UNIT, unit or NO_UNIT)}:"
        f"{_plain(_NOT_NUMBER, str(value))}|#{listed}"
        f"|#hostname:{_plain(_NOT_VALUE, hostname)}{asked},timestamp:{timestamp}"
    )


def _plain(junk: re.Pattern[str], text: str) -> str:
    return junk.sub("_", text) or "_"


def from_worker(text: str) -> str | None:
    """A finished line out of one that a worker printed; None where it is not a metric.

    Multi Model Server logs `null` for those; here they are output like any other.
    """
    found = _PRINTED.fullmatch(text)
    if found is None:
        return None
    head, timestamp, request_ids = found.groups()
    asked = f",requestID:{request_ids}" if request_ids else ""
    return f"{head}{asked},timestamp:{timestamp}"


def worker_load_line(model: str, port: int, load_s: float, *, hostname: str, timestamp: int) -> str:
    """`W-{port}-{model}.ms:…`: a worker is ready, after so long.

    Args:
        port: Multi Model Server's number of a worker, 9000 and up; here the worker's id.
        load_s: of this load, restarts included (there it was the age of the worker object).
    """
    return metric_line(
        f"W-{port}-{model[:25]}",
        int(load_s * 1000),
        "ms",
        HOST,
        hostname=hostname,
        timestamp=timestamp,
    )
