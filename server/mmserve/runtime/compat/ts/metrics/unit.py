"""`ts.metrics.unit`."""

from mmserve.runtime.metrics_store import Units

__all__ = ["Units"]
