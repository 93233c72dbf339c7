"""`ts.context`."""

from mmserve.runtime.context import RequestProcessor
from mmserve.runtime.torchserve.context import TorchServeContext as Context

__all__ = ["Context", "RequestProcessor"]
