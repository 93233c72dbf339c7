"""`context.metrics` as TorchServe's handlers know it.

Calls are those of its documentation (`docs/metrics.md`, releases up to 0.12); lines and units are
those of the store for Multi Model Server.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from mmserve.runtime.metrics_store import COUNTER, Dimension, MetricsStore


class MetricTypes(enum.Enum):
    """What becomes of several values of one metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class TorchServeMetrics(MetricsStore):
    """The metrics of one batch, or of one load."""

    def add_metric(  # type: ignore[override]  # its order is another than Multi Model Server's
        self,
        name: str,
        value: Any,
        unit: str | None = None,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = MetricTypes.COUNTER,
    ) -> None:
        """Any unit; a counter unless it says otherwise."""
        method = COUNTER if _is_counter(metric_type) else None
        self._add(name, value, unit, idx, dimensions, method)

    def add_time(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "ms",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = MetricTypes.GAUGE,
    ) -> None:
        super().add_time(name, value, idx, unit, dimensions)

    def add_size(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        unit: str = "MB",
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = MetricTypes.GAUGE,
    ) -> None:
        super().add_size(name, value, idx, unit, dimensions)

    def add_percent(
        self,
        name: str,
        value: Any,
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: Any = MetricTypes.GAUGE,
    ) -> None:
        super().add_percent(name, value, idx, dimensions)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str] = (),
        metric_type: Any = MetricTypes.COUNTER,
    ) -> CachingMetric:
        """A metric without a value yet."""
        return CachingMetric(self, metric_name, unit, dimension_names, metric_type)


class CachingMetric:
    """A metric that gets its values later, each with values for the dimensions."""

    def __init__(
        self,
        store: TorchServeMetrics,
        metric_name: str,
        unit: str,
        dimension_names: Sequence[str],
        metric_type: Any,
    ) -> None:
        self._store = store
        self.metric_name, self.unit = metric_name, unit
        self.dimension_names, self.metric_type = list(dimension_names), metric_type

    def add_or_update(
        self, value: Any, dimension_values: Sequence[Any] = (), request_id: str = ""
    ) -> None:
        """Raises ValueError where there are not as many values as dimensions."""
        named = zip(self.dimension_names, dimension_values, strict=True)
        dimensions = [Dimension(name, str(each)) for name, each in named]
        self._store.add_metric(
            self.metric_name, value, self.unit, None, dimensions, self.metric_type
        )


def _is_counter(metric_type: Any) -> bool:
    return bool(getattr(metric_type, "value", metric_type) == COUNTER)
