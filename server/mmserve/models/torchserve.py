"""Archives made for TorchServe: what cannot be served is refused before a worker starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmserve.errors import InvalidModel
from mmserve.models.disk import storage_failed
from mmserve.models.entries import quoted
from mmserve.models.layout import Layout
from mmserve.models.manifest import Manifest
from mmserve.models.source import is_within
from mmserve.runtime.torchserve import BUILTIN, UNSERVED, entries, is_torchserve

#: At least one of these is in the text of each of its manifests.
_MARKS = ("archiverVersion", "serializedFile", "modelFile", "requirementsFile", "configFile")
_MARKS_OF_OTHERS = ("extraFiles", "workflow")

#: More of TorchServe's own handlers, each for a library or a way of serving that is not there.
_OTHERS = (
    "base_deepspeed_handler",
    "base_neuronx_continuous_batching_handler",
    "base_neuronx_microbatching_handler",
    "base_pippy_handler",
    "dali_image_classifier",
    "dali_image_segmenter",
    "densenet_handler",
    "micro_batching_handler",
    "trt_llm_handler",
    "vllm_handler",
)
_MAX_BYTES = 1 << 20
_MOST_SHOWN = 5


def may_be_torchserve(manifest: Manifest) -> bool:
    """Whether its text is worth a second look."""
    return any(mark in manifest.text for mark in (*_MARKS, *_MARKS_OF_OTHERS))


def refuse_unserved(layout: Layout, handler: str | None, search_path: Sequence[str]) -> None:
    """Does nothing for an archive that is not TorchServe's, or can be served.

    Args:
        handler: that of the registration, stronger than the manifest's.
        search_path: folders that hold the packages that workers can import.

    Raises:
        InvalidModel: it asks for what is not there; the message names it and says what to do.
        StorageFailed: the disk does not let us look.
    """
    manifest = json.loads(layout.manifest.text)
    if not is_torchserve(manifest):
        return
    for reason in _reasons(layout, manifest, handler, search_path):
        raise InvalidModel(f"This TorchServe archive cannot be served: {reason}.")


def _reasons(
    layout: Layout, manifest: dict[str, Any], handler: str | None, search_path: Sequence[str]
) -> Iterator[str]:
    if "workflow" in manifest:
        yield (
            "it is a workflow (.war). Register the models that it names one by one, and call them "
            "from the client, or from one handler that loads them all"
        )
    directory, named = Path(layout.directory), entries(manifest)
    for entry in ("serializedFile", "modelFile", "requirementsFile", "configFile"):
        name = named.get(entry)
        if name is not None and not _is_file(directory, name):
            yield f"its {entry}, {quoted(name)}, is not in it. Make the archive again"
    yield from _of_handler(handler or named.get("handler", ""), layout, search_path)
    if (name := named.get("requirementsFile")) is not None:
        from mmserve.runtime.torchserve import requirements

        if lacking := requirements.missing(_text(directory / name), search_path):
            shown = ", ".join(map(quoted, lacking[:_MOST_SHOWN]))
            if len(lacking) > _MOST_SHOWN:
                shown += f" and {len(lacking) - _MOST_SHOWN} more"
            yield (
                f"{quoted(name)} asks for {shown}, not installed here. "
                "Nothing is installed for one model: pip install it where the server is"
            )
    if (name := named.get("configFile")) is not None:
        from mmserve.runtime.torchserve import config

        try:
            reason = config.unserved(config.parse(_text(directory / name)))
        except config.BadConfig as error:
            reason = str(error)
        if reason is not None:
            yield f"{quoted(name)}: {reason}"


def _of_handler(text: str, layout: Layout, search_path: Sequence[str]) -> Iterator[str]:
    """Why a handler that the archive does not bring cannot be had."""
    path = text.rpartition(":")[0] or text
    module = path.rpartition("/")[2].removesuffix(".py")
    if module in BUILTIN or module not in (*UNSERVED, *_OTHERS):
        return
    if module in layout.top_names or module in layout.code_names:
        return
    instead = UNSERVED.get(module, "bring a handler of your own that does without it")
    yield f"TorchServe's own handler {module!r} has no equal here. What to do: {instead}"


def _is_file(directory: Path, name: str) -> bool:
    path = directory / name
    try:
        return is_within(path, directory.resolve()) and path.is_file()
    except (OSError, ValueError):  # text that no file name can be
        return False


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8-sig", "replace")
    except OSError as error:
        raise storage_failed("read", path, error) from error
