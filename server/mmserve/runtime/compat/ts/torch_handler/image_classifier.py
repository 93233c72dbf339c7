"""`ts.torch_handler.image_classifier`."""

from mmserve.runtime.torchserve.image_classifier import ImageClassifier

__all__ = ["ImageClassifier"]
