"""`ts.torch_handler.object_detector`."""

from mmserve.runtime.torchserve.object_detector import ObjectDetector

__all__ = ["ObjectDetector"]
