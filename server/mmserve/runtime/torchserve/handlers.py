"""The handlers that TorchServe's users extend, or name instead of bringing their own.

Imports torch: only a model's code brings this module into a worker.
"""

from __future__ import annotations

import base64
import importlib
import io
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmserve.runtime.failures import HandlerProblem
from mmserve.runtime.torchserve.labels import (
    list_classes_from_module,
    load_label_mapping,
)
from mmserve.runtime.torchserve.pickles import needed_code

LABELS = "index_to_name.json"


class BaseHandler:
    """Loads the model that the manifest names and takes requests through it.

    A subclass overrides what differs; names and arguments are TorchServe's.

    Attributes:
        model: in evaluation mode, on the device.
        device, map_location: where it is, as an object and as text.
        mapping: class number → name, where the archive has `index_to_name.json`.
    """

    # Of the class, for many a subclass has an `__init__` that does not call this one's.
    model: Any = None
    mapping: dict[str, str] | None = None
    device: Any = None
    map_location = "cpu"
    initialized = False
    context: Any = None
    manifest: Any = None
    model_pt_path: str | None = None
    model_yaml_config: Mapping[str, Any] = {}
    explain, target = False, 0

    def initialize(self, context: Any) -> None:
        """Loads the model.

        `modelFile` names the source of the model's class, whose weights `serializedFile` has;
        without it `serializedFile` is a TorchScript program.

        Raises:
            HandlerProblem: a file is missing or has another form; the text says what to do.
        """
        self.context, self.manifest = context, context.manifest
        self.model_yaml_config = getattr(context, "model_yaml_config", None) or {}
        properties = context.system_properties
        gpu = properties.get("gpu_id")
        on_gpu = gpu is not None and torch.cuda.is_available()
        self.map_location = "cuda" if on_gpu else "cpu"
        self.device = torch.device(f"cuda:{gpu}" if on_gpu else "cpu")
        model_dir = properties["model_dir"]
        named = (self.manifest or {}).get("model", {})
        serialized, source = named.get("serializedFile"), named.get("modelFile")
        self.model_pt_path = os.path.join(model_dir, serialized) if serialized else None
        if self.model_pt_path is not None and not os.path.isfile(self.model_pt_path):
            raise HandlerProblem(f"The serializedFile {serialized} is not in the archive.")
        if source:
            self.model = self._load_pickled_model(model_dir, source, self.model_pt_path)
        elif self.model_pt_path is not None:
            self.model = self._load_torchscript_model(self.model_pt_path)
        if isinstance(self.model, torch.nn.Module):
            self.model.to(self.device)
            self.model.eval()
        self.mapping = load_label_mapping(os.path.join(model_dir, LABELS))
        self.initialized = True

    def _load_torchscript_model(self, model_pt_path: str) -> Any:
        ending = os.path.splitext(model_pt_path)[1]
        if ending in (".onnx", ".pt2", ".safetensors", ".so"):
            raise HandlerProblem(
                f"{os.path.basename(model_pt_path)} is no TorchScript program. Bring a handler "
                "that loads it, or name the model's class with modelFile and save its state dict."
            )
        try:
            load: Any = torch.jit.load  # which has no types
            return load(model_pt_path, map_location=self.device)
        except RuntimeError as error:
            raise HandlerProblem(
                f"{os.path.basename(model_pt_path)} is no TorchScript program ({_line(error)}). "
                "Where it is a state dict, name the file of the model's class with modelFile."
            ) from error

    def _load_pickled_model(
        self, model_dir: str, model_file: str, model_pt_path: str | None
    ) -> Any:
        path = os.path.join(model_dir, model_file)
        if not os.path.isfile(path):
            raise HandlerProblem(f"The modelFile {model_file} is not in the archive.")
        if model_dir not in sys.path:
            sys.path.append(model_dir)
        module = importlib.import_module(os.path.splitext(os.path.basename(model_file))[0])
        classes = list_classes_from_module(module, torch.nn.Module)
        if len(classes) != 1:
            names = ", ".join(kind.__name__ for kind in classes) or "none"
            raise HandlerProblem(
                f"The modelFile {model_file} must define exactly one torch.nn.Module; it defines "
                f"{names}."
            )
        model = classes[0]()
        if model_pt_path is not None:
            load_state_dict(model, model_pt_path, self.map_location)
        return model

    def preprocess(self, data: Any) -> Any:
        """The rows of a batch as a tensor."""
        return torch.as_tensor(data, device=self.device)

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """What the model makes of it."""
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)

    def postprocess(self, data: Any) -> Any:
        """A list with one answer for each request."""
        return data.tolist()

    def handle(self, data: Any, context: Any) -> Any:
        """One batch."""
        self.context = context
        began = time.perf_counter()
        answers = self.postprocess(self.inference(self.preprocess(data)))
        took_ms = round((time.perf_counter() - began) * 1e3, 2)
        context.metrics.add_time("HandlerTime", took_ms, None, "ms")
        return answers


def load_state_dict(model: Any, path: str, map_location: Any = "cpu") -> None:
    """Puts a file's weights into a model, without running code that the file may hold.

    The file is mapped, not read, where its form allows that and the types agree.

    Raises:
        HandlerProblem: it is no state dict; the text says what to do.
        RuntimeError: it is one of another model.
    """
    name = os.path.basename(path)
    state = _read_state(path, name, map_location)
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise HandlerProblem(f"{name} is no state dict; save it with torch.save(m.state_dict(), …)")
    own = model.state_dict()
    is_alike = all(
        isinstance(value, torch.Tensor) and value.dtype == own[key].dtype
        for key, value in state.items()
        if key in own
    )
    model.load_state_dict(state, assign=is_alike)
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _read_state(path: str, name: str, map_location: Any) -> Any:
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(path, device=str(map_location))
    try:
        with open(path, "rb") as file:
            mapped = file.read(4) == b"PK\x03\x04"  # else torch before 1.6 wrote it
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise HandlerProblem(
            f"{name} can be read only by running code that it names ({needed_code(error)}), which "
            "is not done. Save the weights alone: torch.save(model.state_dict(), …)."
        ) from None
    except (RuntimeError, EOFError) as error:
        raise HandlerProblem(f"{name} is no file of torch.save ({_line(error)}).") from error


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200].rstrip(". ")


class VisionHandler(BaseHandler):
    """For models of images.

    Attributes:
        image_processing: PIL image → tensor; a subclass or its instance has it.
    """

    image_processing: Any = None

    def preprocess(self, data: Sequence[Mapping[str, Any]]) -> Any:
        """The images of a batch, stacked.

        Each is the field `data` or the body: a file, its base64 as text, or a tensor as lists.
        """
        return torch.stack([self._image(row) for row in data]).to(self.device)

    def _image(self, row: Mapping[str, Any]) -> Any:
        value = row.get("data")
        if value is None:
            value = row.get("body")
        if isinstance(value, str):
            value = base64.b64decode(value)
        if not isinstance(value, bytes | bytearray | memoryview):
            return torch.tensor(value, dtype=torch.float32)
        from PIL import Image

        with Image.open(io.BytesIO(value)) as image:
            return self.image_processing(image.convert("RGB"))
