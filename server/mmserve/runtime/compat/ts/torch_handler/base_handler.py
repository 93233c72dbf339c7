"""`ts.torch_handler.base_handler`."""

from mmserve.runtime.torchserve.handlers import BaseHandler

__all__ = ["BaseHandler"]
