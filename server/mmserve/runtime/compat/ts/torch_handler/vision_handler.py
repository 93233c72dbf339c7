"""`ts.torch_handler.vision_handler`."""

from mmserve.runtime.torchserve.handlers import VisionHandler

__all__ = ["VisionHandler"]
