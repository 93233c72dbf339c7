"""TorchServe's archives and handlers, served by our workers.

What its handlers import as `ts…` is in the compat directory and comes from here. This module alone
is imported where no such archive is in sight.
"""

from __future__ import annotations

from typing import Any

#: Entries of the manifest's `model` that only torch-model-archiver writes.
_OWN_ENTRIES = ("serializedFile", "modelFile", "requirementsFile", "configFile", "extraFiles")

#: Handlers that an archive may name instead of bringing one → their class. Those of TorchServe
#: that are not here are in `UNSERVED`.
BUILTIN = {
    "base_handler": "BaseHandler",
    "image_classifier": "ImageClassifier",
    "object_detector": "ObjectDetector",
}

#: TorchServe's other handlers → what to do instead.
UNSERVED = {
    "image_segmenter": "bring a handler that extends VisionHandler and lays out its own answer",
    "text_classifier": "bring a handler that reads its vocabulary, or serve the model as BERT",
    "text_handler": "bring a handler that extends BaseHandler",
}

_PACKAGE = "ts.torch_handler"


def is_torchserve(manifest: Any) -> bool:
    """Whether a manifest, decoded, is one of torch-model-archiver's."""
    if not isinstance(manifest, dict):
        return False
    model = manifest.get("model")
    if isinstance(model, dict) and any(name in model for name in _OWN_ENTRIES):
        return True
    return "archiverVersion" in manifest or "workflow" in manifest


def builtin_module(name: str) -> str | None:
    """Module of the handler that TorchServe has under a name, where we have it too."""
    return f"{_PACKAGE}.{name}" if name in BUILTIN else None


def entries(manifest: Any) -> dict[str, str]:
    """The `model` part of a manifest: name → text, whatever is not text left out."""
    model = manifest.get("model") if isinstance(manifest, dict) else None
    if not isinstance(model, dict):
        return {}
    return {key: value for key, value in model.items() if isinstance(value, str) and value}
