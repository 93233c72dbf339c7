"""`ts.metrics.metric_encoder`."""

from mmserve.runtime.metrics_store import MetricEncoder

__all__ = ["MetricEncoder"]
