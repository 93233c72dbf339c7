"""`mms.metrics.metrics_store`."""

from mmserve.runtime.metrics_store import MetricsStore

__all__ = ["MetricsStore"]
