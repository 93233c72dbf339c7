"""`ts.metrics.metrics_store`."""

from mmserve.runtime.torchserve.metrics import TorchServeMetrics as MetricsStore

__all__ = ["MetricsStore"]
