"""`ts.utils.timeit_decorator`."""

from mmserve.runtime.torchserve.timing import timeit

__all__ = ["timeit"]
