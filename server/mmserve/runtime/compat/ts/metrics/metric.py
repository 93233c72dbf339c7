"""`ts.metrics.metric`."""

from mmserve.runtime.metrics_store import Metric

__all__ = ["Metric"]
