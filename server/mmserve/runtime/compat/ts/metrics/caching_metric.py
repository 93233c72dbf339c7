"""`ts.metrics.caching_metric`."""

from mmserve.runtime.torchserve.metrics import CachingMetric

__all__ = ["CachingMetric"]
