"""Image classification with a ResNet: `mmserve_handlers.resnet:handle`.

An archive holds weights, and says how images are prepared. Two kinds are taken:

*   what torchvision's networks save: a state dict in one file, `model.pt`, `model.pth` or
    `model.safetensors` (or the only file with such an ending), also inside `{"state_dict": …}` and
    with the `module.` of `DataParallel`. ResNet 18 to 152, ResNeXt and Wide ResNet are told apart
    by the shapes of their weights;
*   what `save_pretrained` writes for a ResNet of transformers: `config.json`,
    `preprocessor_config.json` and `model.safetensors`.

Labels are lines of `labels.txt`, or in `model.json`, where everything has a default:

    {"architecture": "resnet50", "labels": ["cat", "dog"], "resize": 256, "crop": 224,
     "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}

An image's short side is scaled to `resize` and its middle cut out, as torchvision's weights ask
for (IMAGENET1K_V2 has 232). With `size` in their place it is scaled to a square instead. More
keys: `interpolation`, `antialias`, `top_k`, `task`, `activation`, `device`, `precision`, `weights`
(the file's name), `max_pixels`, and `full_scale`, the brightest value of images that come as
numbers. The labels `"imagenet"` are its 1000. The same may stand in the manifest's `model.options`.

Weights are mapped from the file, so workers share their pages, and never unpickled beyond tensors.

Requests are those of `images.py`. Beside the image may be said, in JSON, as fields of a form, or
where the body is a file, in `X-Amzn-SageMaker-Custom-Attributes: top_k=3,task=features`:

    "top_k": 3                the number of labels wanted
    "task": "features"        what the network makes of the image before its last layer

Answers, as JSON, or with `Accept: application/x-npy` as the numbers of all labels:

    {"predictions": [{"label": "cat", "probability": 0.98}, …]}       one list each for `images`
    {"features": [0.31, …]}
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torchvision  # type: ignore[import-untyped,unused-ignore]  # typed in some releases only
from PIL import Image
from torchvision.models.resnet import (  # type: ignore[import-untyped,unused-ignore]
    BasicBlock,
    Bottleneck,
    ResNet,
)

from mmserve_handlers import images, options, precision, weights
from mmserve_handlers.contract import BadInput, BadOutput, Context, Item, Refused
from mmserve_handlers.images import Pixels, Preparation, ResizeAndCrop, Square
from mmserve_handlers.replies import refuse, reply

#: Labels of one image, where neither the request nor the model says.
TOP_K = 3
#: Images of one forward pass; more would only need more memory.
CHUNK = 32
#: Digits after the point in answers that are JSON.
DIGITS = 6
TASKS = ("classify", "features")
ACTIVATIONS = ("softmax", "sigmoid")

#: Of ImageNet, in red, green, blue. Source: torchvision's weights, IMAGENET1K_V1.
MEAN, STD, RESIZE, CROP = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 256, 224

WEIGHTS = ("model.safetensors", "model.pt", "model.pth")
_FIRST_BLOCK = "layer1.0.conv1.weight"

# ------------------------------------------------------------------------------- model.json


class Recipe(NamedTuple):
    """`model.json`: what the network is, and how images become what it was trained on."""

    architecture: str | None  # None: whatever the weights are
    labels: list[str] | None  # None: the network's own, or the numbers of its outputs
    prepare: Preparation | None  # None: nothing is said; the network's own, or ImageNet's
    full_scale: float
    top_k: int
    task: str | None
    activation: str | None
    weights: str | None
    max_pixels: int
    device: str
    precision: str | None  # None: 16 bits on a GPU, 32 on a CPU


def recipe(folder: Path, manifest: object = None) -> Recipe:
    """Reads `model.json`, or the manifest's options, and `labels.txt`, each if it is there.

    Raises:
        ValueError: says which entry is missing or wrong, and what it should be.
    """
    said = options.said_of(folder, manifest, _READERS)
    labels = said.get("labels")
    return Recipe(
        architecture=said.get("architecture"),
        labels=_lines(folder / "labels.txt") if labels is None else labels,
        prepare=_preparation(said),
        full_scale=said.get("full_scale", 255.0),
        top_k=said.get("top_k", TOP_K),
        task=said.get("task"),
        activation=said.get("activation"),
        weights=said.get("weights"),
        max_pixels=said.get("max_pixels", images.MAX_PIXELS),
        device=said.get("device", "auto"),
        precision=said.get("precision"),
    )


def _preparation(said: Mapping[str, Any]) -> Preparation | None:
    mean, std = said.get("mean", MEAN), said.get("std", STD)
    if "size" in said:
        if "resize" in said or "crop" in said:
            raise options.BadOption(
                f"{options.FILE}: size scales to a square; resize and crop keep the shape and cut: "
                "say one or the other"
            )
        return Square(said["size"], mean, std)
    if not {"resize", "crop", "mean", "std", "interpolation", "antialias"} & said.keys():
        return None
    crop = said.get("crop", CROP)
    return ResizeAndCrop(
        resize=said.get("resize", max(crop, RESIZE)),
        crop=crop,
        mean=mean,
        std=std,
        interpolation=said.get("interpolation", "bilinear"),
        antialias=said.get("antialias", True),
    )


def _lines(file: Path) -> list[str] | None:
    """The labels of `labels.txt`; None where it is not there."""
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ValueError("labels.txt is not text in UTF-8") from None
    lines = [line.strip() for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    if "" in lines or not lines:
        raise ValueError(f"labels.txt: line {lines.index('') + 1 if lines else 1} is empty")
    return lines


def _labels(value: Any) -> list[str]:
    """A list, or as `id2label` has them; they may be alike, as "crane" is twice in ImageNet."""
    if value == "imagenet":
        categories = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.meta["categories"]
        return list(map(str, categories))
    if isinstance(value, dict):
        numbers = [str(number) for number in range(len(value))]
        if set(numbers) != set(value):
            raise options.Wrong('an object names each by its place: {"0": "cat", "1": "dog"}')
        value = [value[number] for number in numbers]
    if not isinstance(value, list) or not value or not all(map(_is_label, value)):
        raise options.Wrong('allowed is a list of texts, one for each output, or "imagenet"')
    return [str(label) for label in value]


def _is_label(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or Path(value).name != value:
        raise options.Wrong("allowed is the name of a file in the archive")
    return value


def _above_zero(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise options.Wrong("allowed are numbers above 0")
    return float(value)


def _mean(value: Any) -> list[float]:
    values = value if isinstance(value, list) else [value]
    if len(values) not in (1, 3) or not all(
        type(one) in (int, float) and abs(one) < 1e30 for one in values
    ):
        raise options.Wrong("allowed are one number or three")
    return [float(one) for one in values]


def _std(value: Any) -> list[float]:
    values = _mean(value)
    if not all(one > 0 for one in values):
        raise options.Wrong("allowed are one number or three, above 0")
    return values


# Source: torchvision.models.resnet. Kind of blocks, how many in each layer, groups, width.
NAMES: Mapping[tuple[bool, tuple[int, int, int, int], int, int], str] = {
    (False, (2, 2, 2, 2), 1, 64): "resnet18",
    (False, (3, 4, 6, 3), 1, 64): "resnet34",
    (True, (3, 4, 6, 3), 1, 64): "resnet50",
    (True, (3, 4, 23, 3), 1, 64): "resnet101",
    (True, (3, 8, 36, 3), 1, 64): "resnet152",
    (True, (3, 4, 6, 3), 32, 4): "resnext50_32x4d",
    (True, (3, 4, 23, 3), 32, 8): "resnext101_32x8d",
    (True, (3, 4, 23, 3), 64, 4): "resnext101_64x4d",
    (True, (3, 4, 6, 3), 1, 128): "wide_resnet50_2",
    (True, (3, 4, 23, 3), 1, 128): "wide_resnet101_2",
}

_READERS: Mapping[str, options.Reader] = {
    "architecture": options.one_of(tuple(NAMES.values())),
    "labels": _labels,
    "resize": options.whole(1, 4096),
    "crop": options.whole(1, 4096),
    "size": options.whole(1, 4096),
    "mean": _mean,
    "std": _std,
    "interpolation": options.one_of(images.INTERPOLATIONS),
    "antialias": options.truth,
    "full_scale": _above_zero,
    "top_k": options.whole(1),
    "task": options.one_of(TASKS),
    "activation": options.one_of(ACTIVATIONS),
    "weights": _file_name,
    "max_pixels": options.whole(1),
    "device": options.device,
    "precision": options.one_of(options.PRECISIONS),
}

# ------------------------------------------------------------------------------- weights


def weights_file(folder: Path, name: str | None = None) -> Path:
    """The file with a model's weights.

    Raises:
        FileNotFoundError: there is none, or several; names what was looked for.
    """
    for candidate in (name,) if name else WEIGHTS:
        if (folder / candidate).is_file():
            return folder / candidate
    if name:
        raise FileNotFoundError(f"the archive has no {name}, which model.json calls its weights")
    endings = {Path(one).suffix for one in WEIGHTS}
    found = sorted(path for path in folder.iterdir() if path.suffix in endings)
    if len(found) == 1:
        return found[0]
    several = (
        f"several weights ({', '.join(path.name for path in found)}), none of them"
        if found
        else "no"
    )
    raise FileNotFoundError(
        f"the archive has {several} model.safetensors, model.pt or model.pth; "
        "torch.save(model.state_dict(), 'model.pt') writes one"
    )


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """A state dict, mapped from its file where the file allows it.

    Raises:
        BadWeights: the file is broken, or has something else in it; says what to save instead.
    """
    state = weights.load_files([path])
    first = [key for key in state if key.endswith(_FIRST_BLOCK)]
    # `module.` of DataParallel, `_orig_mod.` of torch.compile, and what trainers wrap around.
    prefix = first[0].removesuffix(_FIRST_BLOCK) if len(first) == 1 else ""
    if prefix and all(key.startswith(prefix) for key in state):
        return {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _line(wrong: Exception) -> str:
    """The last line of what a library says, which is the most particular one."""
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return (lines or [type(wrong).__name__])[-1][:200]


# ------------------------------------------------------------------------------- the network


class Shape(NamedTuple):
    """What tells torchvision's ResNets apart, read from the shapes of their weights."""

    is_bottleneck: bool
    blocks: tuple[int, int, int, int]
    groups: int
    width: int
    classes: int | None  # None: the last layer was left out

    @property
    def name(self) -> str:
        known = NAMES.get(self[:4])
        return known or f"ResNet of {self.blocks} {('basic', 'bottleneck')[self[0]]} blocks"

    def build(self) -> torch.nn.Module:
        """The network, without weights."""
        block = Bottleneck if self.is_bottleneck else BasicBlock
        classes, (_, blocks, groups, width) = self.classes or 1, self[:4]
        with torch.device("meta"):
            network: torch.nn.Module = ResNet(
                block, list(blocks), num_classes=classes, groups=groups, width_per_group=width
            )
        return network


def shape_of(shapes: Mapping[str, Sequence[int]], file: str = "the file") -> Shape:
    """Which ResNet a state dict is of, from the names and shapes in it.

    Raises:
        ValueError: of none that torchvision has.
    """
    counts = []
    for layer in range(1, 5):
        found = [re.match(rf"layer{layer}\.(\d+)\.conv1\.weight$", key) for key in shapes]
        counts.append(len([one for one in found if one]))
    first, second = shapes.get(_FIRST_BLOCK, ()), shapes.get("layer1.0.conv2.weight", ())
    if not all(counts) or len(first) != 4 or len(second) != 4 or "conv1.weight" not in shapes:
        some = ", ".join(list(shapes)[:3])
        raise ValueError(
            f"{file} has not the weights of a ResNet as torchvision names them "
            f"(conv1.weight, {_FIRST_BLOCK}, …); it has {some}, …"
        )
    groups = max(1, first[0] // max(1, second[1]))
    head = shapes.get("fc.weight")
    if head is None and any(key.startswith("fc.") for key in shapes):
        raise ValueError(
            f"{file}: the last layer must be one Linear called fc; it has "
            + ", ".join(key for key in shapes if key.startswith("fc."))
        )
    is_bottleneck = "layer1.0.conv3.weight" in shapes
    width = first[0] // groups if is_bottleneck else 64
    blocks = (counts[0], counts[1], counts[2], counts[3])
    return Shape(is_bottleneck, blocks, groups, width, head[0] if head else None)


class Network(NamedTuple):
    """A loaded network in two parts, and what it knows of itself."""

    name: str
    body: Callable[[torch.Tensor], torch.Tensor]  # (images, 3, height, width) → (images, width)
    head: Callable[[torch.Tensor], torch.Tensor] | None  # (images, width) → (images, labels)
    classes: int
    labels: list[str] | None
    activation: str
    prepare: Preparation | None


class Place(NamedTuple):
    """Where a network runs, and in which type its convolutions multiply."""

    device: torch.device
    kind: torch.dtype
    prepared: Path | None  # where weights lie that were cast once, for all workers to map


def torchvision_network(path: Path, place: Place) -> Network:
    """A network of torchvision around the weights in a file; nothing is copied on a CPU.

    Raises:
        ValueError: the weights are broken, or of no ResNet that is known.
    """
    state = state_of(path)
    shape = shape_of({key: tuple(value.shape) for key, value in state.items()}, path.name)
    network: Any = shape.build()
    head, network.fc = network.fc, torch.nn.Identity()
    has_head = shape.classes is not None
    parts = {key: state.pop(f"fc.{key}") for key in ("weight", "bias") if f"fc.{key}" in state}
    wrong = f"{path.name} does not fit"
    _assign(network, state, [path], place, f"{wrong} a {shape.name}")
    if has_head:
        place = place._replace(kind=torch.float32)  # 16 bits show most in what is told
        _assign(head, parts, [path], place, f"{wrong} its last layer")
    return Network(
        shape.name, network, head if has_head else None, shape.classes or 0, None, "softmax", None
    )


def _assign(
    network: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    sources: Sequence[Path],
    place: Place,
    wrong: str,
) -> None:
    """Makes tensors the parameters of a network; copies nothing where they have its types.

    Args:
        sources: the files that they are mapped from.
        wrong: how the message begins where they do not fit.
    """
    if any(value.is_sparse or value.is_quantized for value in state.values()):
        raise ValueError(f"{wrong}: some of its tensors are sparse or quantized")
    try:
        network.load_state_dict(state, assign=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:4]]
        raise ValueError(f"{wrong}: {' '.join(lines)[:500]}") from None
    network.requires_grad_(False).eval()
    own = network.state_dict()
    if place.kind == torch.float32:
        types = {key: torch.float32 for key, value in own.items() if value.is_floating_point()}
    else:
        types = precision.types_of(network, place.kind)
    cast = precision.prepared(own, types, sources, place.prepared)
    network.load_state_dict(cast, assign=True)
    precision.lower(network, place.kind)
    network.to(place.device)
    # Input in channels_last makes most of the gain by itself on a CPU, and weights in it would be
    # a private copy in each worker. A file that has them so already (strides are saved) is best.
    if place.device.type != "cpu":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]


def transformers_network(folder: Path, place: Place) -> Network:
    """A ResNet of transformers, as `save_pretrained` wrote it.

    Raises:
        ValueError: its files are broken, or do not fit each other.
    """
    from transformers import ResNetConfig, ResNetForImageClassification

    # The library's types differ from release to release.
    config: Any
    network: Any
    try:
        config = ResNetConfig.from_pretrained(folder, local_files_only=True)
    except Exception as wrong:  # the library's own classes, which differ from release to release
        raise ValueError(f"config.json cannot be used ({_line(wrong)})") from None
    state = weights.load_state(folder)
    with torch.device("meta"):
        network = ResNetForImageClassification(config)
    head = {key: value for key, value in state.items() if key.startswith("classifier.")}
    body = {key.removeprefix("resnet."): state[key] for key in state if key not in head}
    sources, misfit = weights.files(folder), "the checkpoint does not fit"
    _assign(network.resnet, body, sources, place, f"{misfit} the ResNet of config.json")
    if head:
        head = {key.removeprefix("classifier."): value for key, value in head.items()}
        place = place._replace(kind=torch.float32)
        _assign(network.classifier, head, sources, place, f"{misfit} the labels of config.json")

    def pooled(batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = network.resnet(batch).pooler_output
        return result.flatten(1)

    is_multi = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return Network(
        f"resnet of transformers, {config.layer_type} blocks {tuple(config.depths)}",
        pooled,
        network.classifier if head else None,
        config.num_labels if head else 0,
        [str(config.id2label[number]) for number in range(config.num_labels)],
        "sigmoid" if is_multi else "softmax",
        Processor(folder) if (folder / "preprocessor_config.json").is_file() else None,
    )


class Processor:
    """Prepares images with a checkpoint's own image processor, as transformers' pipelines do."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoImageProcessor

        factory: Any = AutoImageProcessor
        try:
            self.processor = factory.from_pretrained(folder, local_files_only=True)
        except Exception as wrong:
            raise ValueError(f"preprocessor_config.json cannot be used ({_line(wrong)})") from None
        channels, height, width = self(Image.new("RGB", (64, 64))).shape
        self.shape = (int(channels), int(height), int(width))

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        if isinstance(pixels, torch.Tensor) and pixels.dtype != torch.uint8:
            pixels = (pixels * 255).round().to(torch.uint8)
        done: torch.Tensor = self.processor(images=pixels, return_tensors="pt")["pixel_values"]
        return done[0]


# ------------------------------------------------------------------------------- the service


class Service:
    """One loaded model."""

    def __init__(self, context: Context) -> None:
        """Builds the network around the weights in the archive.

        Raises:
            ValueError, FileNotFoundError: something in the archive is missing, broken or does not
                fit; the message says which file and what it should be.
        """
        folder = Path(context.system_properties["model_dir"])
        self.recipe = recipe(folder, getattr(context, "manifest", None))
        properties = context.system_properties
        self.device = device_of(self.recipe.device, properties.get("gpu_id"))
        usual = "fp32" if self.device.type == "cpu" else "amp"
        kind = precision.chosen(self.recipe.precision or usual, self.device)
        self.place = Place(self.device, kind, precision.folder_of(properties))
        self.network = self._network(folder)
        labels = self.recipe.labels or self.network.labels
        self.labels = labels or [str(number) for number in range(self.network.classes)]
        if self.network.head is not None and len(self.labels) != self.network.classes:
            raise ValueError(
                f"there are {len(self.labels)} labels, and the network has "
                f"{self.network.classes} outputs: model.json or labels.txt must name each, in order"
            )
        wanted = self.recipe.architecture
        if wanted is not None and wanted != self.network.name:
            raise ValueError(
                f"model.json says {wanted}, and the weights are those of a {self.network.name}"
            )
        self.task = self.recipe.task or ("classify" if self.network.head else "features")
        if self.task == "classify" and self.network.head is None:
            raise ValueError('the weights have no last layer (fc); say "task": "features"')
        self.activation = self.recipe.activation or self.network.activation
        imagenet = ResizeAndCrop(RESIZE, CROP, MEAN, STD)
        self.prepare = self.recipe.prepare or self.network.prepare or imagenet

    def _network(self, folder: Path) -> Network:
        kind = _model_type(folder / "config.json")
        if kind is None:
            return torchvision_network(weights_file(folder, self.recipe.weights), self.place)
        if kind != "resnet":
            raise ValueError(f"config.json is of a {kind}; this handler serves ResNets")
        return transformers_network(folder, self.place)

    def handle(self, data: Sequence[Item], context: Context) -> list[bytes]:
        """Answers a batch; all its images go through the network together."""
        asked: list[_Asked | Refused] = []
        for index, item in enumerate(data):
            try:
                asked.append(self.read(item, context, index))
            except Refused as mistake:
                asked.append(mistake)
        every = [image for one in asked if isinstance(one, _Asked) for image in one.images]
        features = self.features(every)
        bodies, start = [], 0
        for index, one in enumerate(asked):
            try:
                if isinstance(one, Refused):
                    raise one
                rows = features[start : start + len(one.images)]
                start += len(one.images)
                bodies.append(self._answer(one, rows, context, index))
            except Refused as mistake:
                bodies.append(refuse(context, index, mistake))
        return bodies

    def read(self, item: Item, context: Context, index: int = 0) -> _Asked:
        """One request, checked. Raises BadInput, which names the field that is wrong."""
        found = images.read(
            item,
            context,
            index,
            self.prepare,
            options=("top_k", "task"),
            full_scale=self.recipe.full_scale,
            max_pixels=self.recipe.max_pixels,
        )
        task = found.options.get("task", self.task)
        if task not in TASKS:
            raise BadInput("task", f"must be one of {', '.join(TASKS)}")
        if task == "classify" and self.network.head is None:
            raise BadInput("task", "must be features: this model has no labels")
        default = min(self.recipe.top_k, len(self.labels))
        top_k = found.options.get("top_k", default)
        if isinstance(top_k, str) and re.fullmatch("[0-9]{1,9}", top_k):
            top_k = int(top_k)
        if type(top_k) is not int or (task == "classify" and not 1 <= top_k <= len(self.labels)):
            raise BadInput("top_k", f"must be a whole number from 1 to {len(self.labels)}")
        return _Asked(found.images, found.is_list, task, top_k)

    @torch.inference_mode()
    def features(self, prepared: Sequence[torch.Tensor]) -> torch.Tensor:
        """float32, (images, width), where the network is; in the order given."""
        if not prepared:
            return torch.empty(0)
        parts = []
        # Some processors of transformers keep an image's shape.
        for _, alike in itertools.groupby(prepared, key=lambda image: image.shape):
            group = list(alike)
            for start in range(0, len(group), CHUNK):
                batch = torch.stack(group[start : start + CHUNK])
                batch = batch.to(self.device, memory_format=torch.channels_last)
                parts.append(self.network.body(batch).float())
        return torch.cat(parts)

    @torch.inference_mode()
    def _answer(self, asked: _Asked, rows: torch.Tensor, context: Context, index: int) -> bytes:
        head = self.network.head
        scores = rows if asked.task == "features" or head is None else head(rows)
        finite = torch.isfinite(scores).all(dim=1).tolist()
        if not all(finite):
            which = f"images[{finite.index(False)}]" if asked.is_list else "the image"
            raise BadOutput(
                f"the network answered NaN or infinity for {which}: its weights are broken, or "
                "the image was prepared otherwise than they were trained with"
            )
        if asked.task == "features":
            values = scores.cpu()
            array = values if asked.is_list else values[0]
            return reply(context, index, lambda: {"features": _rounded(array)}, array)
        is_softmax = self.activation == "softmax"
        chances = (torch.softmax(scores, 1) if is_softmax else torch.sigmoid(scores)).cpu()

        def named() -> dict[str, Any]:
            each = self._named(chances, asked.top_k)
            return {"predictions": each if asked.is_list else each[0]}

        return reply(context, index, named, chances if asked.is_list else chances[0])

    def _named(self, chances: torch.Tensor, top_k: int) -> list[list[dict[str, Any]]]:
        values, places = torch.topk(chances, top_k)
        return [
            [
                {"label": self.labels[place], "probability": round(value, DIGITS)}
                for value, place in zip(*row, strict=True)
            ]
            for row in zip(values.tolist(), places.tolist(), strict=True)
        ]


def device_of(chosen: str, gpu_id: object) -> torch.device:
    """Where the network runs.

    Args:
        chosen: "auto", "cpu", "cuda" or "cuda:N".
        gpu_id: the one that the server gave this worker, or None.

    Raises:
        BadOption: it is not there.
    """
    has_gpu = torch.cuda.is_available()
    if chosen == "cpu" or (chosen == "auto" and (gpu_id is None or not has_gpu)):
        return torch.device("cpu")
    number = int(chosen[5:]) if chosen.startswith("cuda:") else int(str(gpu_id or 0))
    if not has_gpu or number >= torch.cuda.device_count():
        raise options.BadOption(
            f"{options.FILE}: device is {json.dumps(chosen)}, and torch finds no such GPU here; "
            "allowed are cpu, and auto, which takes what is there"
        )
    return torch.device("cuda", number)


class _Asked(NamedTuple):
    images: list[torch.Tensor]
    is_list: bool
    task: str
    top_k: int


def _rounded(array: torch.Tensor) -> list[Any]:
    """Seven digits that count, which is what float32 holds."""
    if array.dim() > 1:
        return [_rounded(row) for row in array]
    return [float(f"{value:.7g}") for value in array.tolist()]


def _model_type(path: Path) -> str | None:
    """What `config.json` says it is of; None where there is none of transformers."""
    try:
        said = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ValueError("config.json is not JSON") from None
    kind = said.get("model_type") if isinstance(said, dict) else None
    return kind if isinstance(kind, str) else None


_service: Service | None = None


def handle(data: Sequence[Item] | None, context: Context) -> list[bytes] | None:
    """The entry point: loads on the first call, where `data` is None, then answers batches."""
    global _service
    if _service is None:
        _service = Service(context)
    return None if data is None else _service.handle(data, context)


# ------------------------------------------------------------------------------- beforehand


def check(folder: Path, target: Path | None = None) -> dict[str, Any]:
    """Loads what an archive will hold, as a worker does, and tells what it is.

    Args:
        folder: the files.
        target: where the state dict of a network of torchvision is written, laid out as the CPU
            likes it (channels_last, float32): workers then map it, and none converts a copy.

    Raises:
        ValueError, FileNotFoundError: it cannot be served.
    """
    properties = {"model_dir": str(folder), "gpu_id": None}
    service = Service(cast(Context, types.SimpleNamespace(system_properties=properties)))
    network = service.network
    features = service.features([torch.zeros(service.prepare.shape)])
    scores = features if network.head is None else network.head(features)
    if not torch.isfinite(scores).all():
        raise ValueError("the network answers a grey image with NaN or infinity: they are broken")
    if target is not None and isinstance(network.body, ResNet):
        body = network.body.to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
        if isinstance(network.head, torch.nn.Linear):
            body.fc = network.head
        torch.save(body.state_dict(), target)
    labels = 0 if network.head is None else len(service.labels)
    return {"architecture": network.name, "labels": labels, "images": service.prepare.shape}


def main(words: Sequence[str]) -> int:
    """`python -m mmserve_handlers.resnet FOLDER [WEIGHTS]`: `check`, as JSON; 1 where it fails."""
    try:
        print(json.dumps(check(*map(Path, words))))
    except (ValueError, FileNotFoundError) as why:
        print(str(why).replace("\n", " "), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
