"""`context.metrics`: what a handler measures, and the lines that become of it.

Calls, units and dimensions are Multi Model Server's, with its defects mended: every call honours
`dimensions` and leaves the caller's list alone, `add_error` makes a line that can be read, and
`add_metric` needs no unit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mmserve.runtime.failures import sendable

TIME_UNITS = ("ms", "s")
SIZE_UNITS = ("MB", "kB", "GB", "B")
COUNTER = "counter"


class Units:
    """Short unit → the word in the line."""

    def __init__(self) -> None:
        self.units: dict[str | None, str] = {
            "ms": "Milliseconds",
            "s": "Seconds",
            "percent": "Percent",
            "count": "Count",
            "MB": "Megabytes",
            "GB": "Gigabytes",
            "kB": "Kilobytes",
            "B": "Bytes",
            None: "unit",
        }


_UNITS = Units().units


@functools.cache
def hostname() -> str:
    """As `mmserve.metrics.host` has it, which would bring pathlib into every worker."""
    return os.uname().nodename or "localhost"


class Dimension:
    """A name and a value that tell metrics of one name apart."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value

    def __str__(self) -> str:
        return f"{self.name}:{self.value}"

    def to_dict(self) -> dict[str, str]:
        return {"Name": self.name, "Value": self.value}


class Metric:
    """One measurement.

    Args:
        unit: a short one of `Units`, or any text.
        dimensions: `Dimension` objects.
        request_id: id, or ids with commas between; None where it belongs to no request.
        metric_method: "counter" when updates add up; else the last one counts.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        unit: str | None,
        dimensions: Sequence[Dimension],
        request_id: str | None = None,
        metric_method: str | None = None,
    ) -> None:
        self.name, self.value = name, value
        self.unit = _UNITS.get(unit, unit)
        self.metric_method = metric_method
        self.dimensions = list(dimensions)
        self.request_id = request_id

    def update(self, value: Any) -> None:
        if self.metric_method == COUNTER:
            with contextlib.suppress(ValueError, TypeError):  # what is no number gets no line
                value = _number(self.value) + _number(value)
        self.value = value

    def __str__(self) -> str:
        """As a worker of Multi Model Server prints it behind `[METRICS]`."""
        listed = ",".join(map(str, self.dimensions))
        asked = f",{self.request_id}" if self.request_id else ""
        return (
            f"{self.name}.{self.unit}:{self.value}|#{listed}"
            f"|#hostname:{hostname()},{int(time.time())}{asked}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "MetricName": self.name,
            "Value": self.value,
            "Unit": self.unit,
            "Dimensions": self.dimensions,
            "Timestamp": int(time.time()),
            "HostName": hostname(),
            "RequestId": self.request_id,
        }


class MetricEncoder(json.JSONEncoder):
    """`json.dumps(metrics, cls=MetricEncoder)`."""

    def default(self, o: Any) -> Any:
        return o.to_dict() if isinstance(o, Metric | Dimension) else super().default(o)


class MetricsStore:
    """The metrics of one batch, or of one load.

    Args:
        request_ids: index in the batch → id.
        model_name: registered name.
    """

    def __init__(self, request_ids: Mapping[int, str], model_name: str) -> None:
        self.store: list[Metric] = []
        self.request_ids, self.model_name = request_ids, model_name
        self.cache: dict[tuple[str, ...], Metric] = {}

    def add_counter(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Same name, request and dimensions: values add up."""
        self._add(name, value, "count", idx, dimensions, COUNTER)

    def add_time(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Raises ValueError for a unit other than ms and s."""
        if unit not in TIME_UNITS:
            raise ValueError(f"the unit for a timed metric should be one of {list(TIME_UNITS)}")
        self._add(name, value, unit, idx, dimensions)

    def add_size(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Raises ValueError for a unit other than B, kB, MB and GB."""
        if unit not in SIZE_UNITS:
            raise ValueError(f"The unit for size based metric is one of {list(SIZE_UNITS)}")
        self._add(name, value, unit, idx, dimensions)

    def add_percent(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        self._add(name, value, "percent", idx, dimensions)

    def add_metric(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str | None = None,
        dimensions: Sequence[Dimension] | None = None,
    ) -> None:
        """Any unit, or none."""
        self._add(name, value, unit, idx, dimensions)

    def add_error(
        self, name: str, value: Any, dimensions: Sequence[Dimension] | None = None
    ) -> None:
        """An error's number or text. The line of a text counts 1 and has it as a dimension."""
        dimensions = [*(dimensions or ()), Dimension("Level", "Error")]
        self.store.append(Metric(name, value, "", dimensions))

    def _add(
        self,
        name: str,
        value: Any,
        unit: str | None,
        idx: int | None,
        dimensions: Sequence[Dimension] | None,
        method: str | None = None,
    ) -> None:
        ids = self.request_ids
        request_id = ids.get(idx) if idx is not None else None
        if request_id is None:
            request_id = ",".join(ids.values())
        all_dimensions = [
            *(dimensions or ()),
            Dimension("ModelName", self.model_name),
            Dimension("Level", "Model"),
        ]
        key = (str(name), str(unit), request_id, *map(str, all_dimensions))
        metric = self.cache.get(key)
        if metric is None:
            metric = Metric(name, value, unit, all_dimensions, request_id, method)
            self.cache[key] = metric
            self.store.append(metric)
        else:
            metric.update(value)

    def lines(self, epoch_s: float) -> tuple[list[str], list[str]]:
        """Finished lines for the log, and names of metrics whose value is no number."""
        lines, junk = [], []
        for metric in self.store:
            try:
                line = _line(metric, epoch_s)
            except Exception:  # `store` is the handler's to fill, with whatever it likes
                line = None
            if line is not None:
                lines.append(line)
            else:
                junk.append(str(getattr(metric, "name", type(metric).__name__)))
        return lines, junk


def _line(metric: Metric, epoch_s: float) -> str | None:
    # Few handlers measure: the others do not pay for the module.
    from mmserve.metrics.lines import metric_line

    unit, number = metric.unit, _number_text(metric.value)
    dimensions = [(str(dimension.name), str(dimension.value)) for dimension in metric.dimensions]
    if number is None and not unit:
        dimensions.insert(0, ("Error", str(metric.value)))
        number = "1"
    if number is None:
        return None
    line = metric_line(
        str(metric.name),
        number,
        unit or "Count",
        dimensions,
        hostname=hostname(),
        timestamp=int(epoch_s),
        request_id=metric.request_id or "",
    )
    return sendable(line)


def _number(value: Any) -> Any:
    """A number for adding up; text is read as one where it can be."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return float(value)
    return value


def _number_text(value: Any) -> str | None:
    """The number as digits; None where it is none, or not finite."""
    try:
        number = float(value)
    except Exception:  # whatever a type of the user's raises
        return None
    if number - number != 0:
        return None
    text = str(value).strip() if isinstance(value, int | float | str) else repr(number)
    if isinstance(value, bool) or not text.isascii() or "_" in text:
        text = repr(int(number)) if number.is_integer() else repr(number)
    return text.replace("+", "")
