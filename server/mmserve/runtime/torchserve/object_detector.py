"""The handler `object_detector`. Imports torchvision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchvision import transforms

from mmserve.runtime.torchserve.handlers import VisionHandler
from mmserve.runtime.torchserve.labels import map_class_to_label


class ObjectDetector(VisionHandler):
    """What is found in an image, where and how surely.

    The model takes images of values from 0 to 1, of any size, and answers with a dict of `boxes`,
    `labels` and `scores` for each, as those of torchvision do. An answer is a list with
    `{"cat": [x1, y1, x2, y2], "score": 0.9}` for each of at least `threshold`.
    """

    image_processing = transforms.Compose([transforms.ToTensor()])
    threshold = 0.5

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Any:
        """The images of a batch: stacked where they have one size, else a list."""
        images = [self._image(row).to(self.device) for row in data]
        if all(image.shape == images[0].shape for image in images):
            return torch.stack(images)
        return images

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, list):
            return super().inference(data, *args, **kwargs)
        with torch.inference_mode():
            return self.model(data, *args, **kwargs)

    def postprocess(self, data: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        answers = []
        for found in data:
            is_sure = found["scores"] >= self.threshold
            boxes, classes, scores = (
                found[key][is_sure].tolist() for key in ("boxes", "labels", "scores")
            )
            answer = []
            for box, number, score in zip(boxes, classes, scores, strict=True):
                (named,) = map_class_to_label([[box]], self.mapping, [[number]])
                answer.append({**named, "score": score})
            answers.append(answer)
        return answers
