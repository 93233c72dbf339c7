"""The handler `image_classifier`. Imports torchvision."""

from __future__ import annotations

from typing import Any

import torch
from torchvision import transforms

from mmserve.runtime.torchserve.handlers import VisionHandler
from mmserve.runtime.torchserve.labels import map_class_to_label


class ImageClassifier(VisionHandler):
    """The five likeliest classes of an image and their probabilities.

    Images are prepared as for models trained on ImageNet: 256 pixels on the shorter side, 224
    from the middle, mean and deviation of that data set.
    """

    topk = 5

    image_processing = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )

    def set_max_result_classes(self, topk: int) -> None:
        self.topk = topk

    def get_max_result_classes(self) -> int:
        return self.topk

    def postprocess(self, data: Any) -> list[dict[str, Any]]:
        """Name → probability of the likeliest classes."""
        likely = torch.softmax(data, dim=1)
        probabilities, classes = torch.topk(likely, min(self.topk, likely.shape[1]), dim=1)
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
