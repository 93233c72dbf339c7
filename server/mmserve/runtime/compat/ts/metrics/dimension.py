"""`ts.metrics.dimension`."""

from mmserve.runtime.metrics_store import Dimension

__all__ = ["Dimension"]
