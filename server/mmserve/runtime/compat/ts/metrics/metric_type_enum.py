"""`ts.metrics.metric_type_enum`."""

from mmserve.runtime.torchserve.metrics import MetricTypes

__all__ = ["MetricTypes"]
