"""`ts.handler_utils.timer`."""

from mmserve.runtime.torchserve.timing import timed

__all__ = ["timed"]
