"""Image classification with a ResNet of torchvision: `mmserve_handlers.resnet:handle`.

An archive holds `model.pt` (a state dict, as `torch.save(model.state_dict(), …)` writes it) or
`model.safetensors`, and `model.json`:

    {"architecture": "resnet18", "size": 24, "mean": [0.5], "std": [0.25], "full_scale": 16,
     "labels": ["0", "1", …]}

`size` is the side of the square that images are scaled to, `mean` and `std` are those of training
(one number, or one a channel), and `full_scale` is the brightest value of images that come as
numbers, 255 where it is not given. Weights are mapped from the file, so workers share their pages.

Requests:

    a PNG or JPEG file                                the most likely labels
    [[0, 5, …], …]                                    the same of a grey image, rows of numbers
    {"image": [[0, 5, …], …], "top_k": 3}             with the number of labels wanted
    {"images": [[[0, 5, …], …], …]}                   several; one list of labels each
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torchvision  # type: ignore[import-untyped,unused-ignore]  # typed in some releases only
from PIL import Image

from mmserve_handlers.contract import BadInput, Context, Item, answer, parse_json, payload

#: Images of one request at most, and pixels of one at most (before it is scaled).
MAX_IMAGES = 64
MAX_PIXELS = 32_000_000
#: Labels of one image, where the request does not say.
TOP_K = 3
ARCHITECTURES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
EXAMPLE = (
    '{"architecture": "resnet18", "labels": ["cat", "dog"], "size": 224, '
    '"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
)


class Recipe(NamedTuple):
    """`model.json`: how images become what the network was trained on."""

    architecture: str
    labels: list[str]
    size: int
    mean: list[float]
    std: list[float]
    full_scale: float


class Asked(NamedTuple):
    """One request: float images, (channels, height, width), values 0 to 1."""

    images: list[torch.Tensor]
    top_k: int
    is_list: bool


def recipe(folder: Path) -> Recipe:
    """Reads `model.json`.

    Raises:
        ValueError: says which entry is missing or wrong, and what it should be.
    """
    try:
        said = json.loads((folder / "model.json").read_text())
        found = Recipe(
            architecture=said["architecture"],
            labels=[str(label) for label in said["labels"]],
            size=int(said["size"]),
            mean=[float(value) for value in said["mean"]],
            std=[float(value) for value in said["std"]],
            full_scale=float(said.get("full_scale", 255)),
        )
    except FileNotFoundError:
        raise ValueError(f"the archive has no model.json; write one like {EXAMPLE}") from None
    except OSError as wrong:
        raise ValueError(f"model.json cannot be read: {wrong.strerror}") from None
    except KeyError as missing:
        raise ValueError(f"model.json has no {missing}; write it like {EXAMPLE}") from None
    except TypeError as wrong:
        raise ValueError(f"model.json has an entry of the wrong kind: {wrong}") from None
    if found.architecture not in ARCHITECTURES:
        raise ValueError(f"model.json: architecture must be one of {', '.join(ARCHITECTURES)}")
    if found.size < 1 or not found.labels or found.full_scale <= 0 or 0 in found.std:
        raise ValueError("model.json: size, labels, full_scale and std must not be zero or empty")
    return found


def read(item: Item, full_scale: float, labels: int, content_type: object = None) -> Asked:
    """One request, checked.

    Raises:
        BadInput: names the field that is wrong.
    """
    value = payload(item, content_type)
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        if raw.lstrip()[:1] not in (b"{", b"["):
            return Asked([_decoded(raw)], min(TOP_K, labels), False)
        value = raw
    if isinstance(value, str | bytes):
        value = parse_json(value)
    fields = value if isinstance(value, dict) else {"image": value}
    top_k = fields.get("top_k", min(TOP_K, labels))
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 1 <= top_k <= labels:
        raise BadInput("top_k", f"must be a whole number from 1 to {labels}")
    if "images" in fields:
        rows = fields["images"]
        if not isinstance(rows, list) or not rows:
            raise BadInput("images", "must be a list of images")
        if len(rows) > MAX_IMAGES:
            raise BadInput("images", f"has {len(rows)} images; at most {MAX_IMAGES} are taken")
        images = [_grey(row, f"images[{i}]", full_scale) for i, row in enumerate(rows)]
        return Asked(images, top_k, True)
    if "image" not in fields:
        raise BadInput("image", "is missing; send rows of numbers, or a PNG or JPEG as the body")
    return Asked([_grey(fields["image"], "image", full_scale)], top_k, False)


def _grey(value: Any, field: str, full_scale: float) -> torch.Tensor:
    """Rows of numbers as float (1, height, width)."""
    if not isinstance(value, list) or not value or not isinstance(value[0], list) or not value[0]:
        raise BadInput(field, "must be a list of rows of numbers")
    width = len(value[0])
    if len(value) * width > MAX_PIXELS:
        raise BadInput(field, f"has more than {MAX_PIXELS} pixels")
    for index, row in enumerate(value):
        if not isinstance(row, list) or len(row) != width:
            raise BadInput(
                f"{field}[{index}]", f"must be a row of {width} numbers, as the first is"
            )
        for number in row:
            if type(number) not in (int, float) or not 0 <= number <= full_scale:
                raise BadInput(f"{field}[{index}]", f"must hold numbers from 0 to {full_scale:g}")
    return torch.tensor(value, dtype=torch.float32).unsqueeze(0) / full_scale


def _decoded(raw: bytes) -> torch.Tensor:
    """A PNG or JPEG file as float (channels, height, width), grey or RGB."""
    try:
        # Only these two formats: every decoder more is one more that strangers can feed.
        with Image.open(io.BytesIO(raw), formats=("PNG", "JPEG")) as image:
            if math.prod(image.size) > MAX_PIXELS:
                raise BadInput("body", f"is an image of more than {MAX_PIXELS} pixels")
            mode = "L" if image.mode in ("1", "L", "LA") else "RGB"
            pixels = image.convert(mode)
    except BadInput:
        raise
    # A broken file makes Pillow raise of many kinds: OSError, SyntaxError, ValueError, struct.error
    # and its own decompression bomb, whose warnings may be errors.
    except Exception:
        raise BadInput("body", "is neither JSON nor a whole PNG or JPEG image") from None
    channels = len(pixels.getbands())
    flat = torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8)
    return flat.view(pixels.height, pixels.width, channels).permute(2, 0, 1).float() / 255


class Service:
    """One loaded model."""

    def __init__(self, context: Context) -> None:
        """Builds the network around the weights in the file; nothing is copied on a CPU."""
        folder = Path(context.system_properties["model_dir"])
        gpu_id = context.system_properties.get("gpu_id")
        has_gpu = gpu_id is not None and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{gpu_id}" if has_gpu else "cpu")
        self.recipe = recipe(folder)
        weights = _weights(folder)
        with torch.device("meta"):
            build = getattr(torchvision.models, self.recipe.architecture)
            model: torch.nn.Module = build(num_classes=len(self.recipe.labels))
        model.load_state_dict(weights, assign=True)
        self.model = model.eval().to(self.device)
        self.mean = torch.tensor(self.recipe.mean).view(-1, 1, 1)
        self.std = torch.tensor(self.recipe.std).view(-1, 1, 1)

    def handle(self, data: Sequence[Item], context: Context) -> list[bytes]:
        """Answers a batch; all its images go through the network together."""
        asked: list[Asked | BadInput] = []
        labels, full_scale = len(self.recipe.labels), self.recipe.full_scale
        for index, item in enumerate(data):
            try:
                content_type = context.get_request_header(index, "content-type")
                asked.append(read(item, full_scale, labels, content_type))
            except BadInput as mistake:
                asked.append(mistake)
        every = [image for one in asked if isinstance(one, Asked) for image in one.images]
        chances = self.classify(every) if every else torch.empty(0)
        outcomes: list[dict[str, Any] | BadInput] = []
        start = 0
        for one in asked:
            if isinstance(one, BadInput):
                outcomes.append(one)
                continue
            rows = chances[start : start + len(one.images)]
            start += len(one.images)
            named = [self._named(row, one.top_k) for row in rows]
            outcomes.append({"predictions": named if one.is_list else named[0]})
        return answer(context, outcomes)

    @torch.inference_mode()
    def classify(self, images: Sequence[torch.Tensor]) -> torch.Tensor:
        """Probabilities, float32, (images, labels), on the CPU."""
        batch = torch.stack([self.prepare(image) for image in images]).to(self.device)
        return torch.softmax(self.model(batch).float(), dim=1).cpu()

    def prepare(self, image: torch.Tensor) -> torch.Tensor:
        """Scaled to the network's square, three channels, normalised: (3, size, size)."""
        size = (self.recipe.size, self.recipe.size)
        # Antialiased where it shrinks, as torchvision's own transforms do.
        scaled = torch.nn.functional.interpolate(
            image.unsqueeze(0), size=size, mode="bilinear", align_corners=False, antialias=True
        )[0]
        return (scaled.expand(3, -1, -1) - self.mean) / self.std

    def _named(self, chances: torch.Tensor, top_k: int) -> list[dict[str, Any]]:
        values, places = torch.topk(chances, top_k)
        labels = self.recipe.labels
        return [
            {"label": labels[place], "probability": round(value, 6)}
            for value, place in zip(values.tolist(), places.tolist(), strict=True)
        ]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict, mapped from the file. Raises FileNotFoundError, naming what it looked for."""
    path = folder / "model.safetensors"
    if path.exists():
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = load_file(path)
        return tensors
    path = folder / "model.pt"
    if not path.exists():
        raise FileNotFoundError(
            "the archive has neither model.safetensors nor model.pt; "
            "torch.save(model.state_dict(), 'model.pt') writes one"
        )
    # weights_only: a pickle from a stranger must not run code.
    mapped: dict[str, torch.Tensor] = torch.load(path, mmap=True, weights_only=True)
    return mapped


_service: Service | None = None


def handle(data: Sequence[Item] | None, context: Context) -> list[bytes] | None:
    """The entry point: loads on the first call, where `data` is None, then answers batches."""
    global _service
    if _service is None:
        _service = Service(context)
    return None if data is None else _service.handle(data, context)
