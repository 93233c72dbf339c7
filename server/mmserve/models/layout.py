"""What lies in a model's folder: its manifest, and the modules it brings.

A folder without a manifest that transformers' `save_pretrained` wrote is served as it is, where
there is a handler of ours for its kind of model.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from mmserve.errors import InvalidModel
from mmserve.models.disk import storage_failed
from mmserve.models.entries import module_name, wrapper
from mmserve.models.manifest import Manifest, parse, parse_legacy
from mmserve.models.source import is_within

MAX_MANIFEST_BYTES = 1 << 20

#: `model_type` of a config.json → who serves it.
_HANDLERS = {
    "bert": "mmserve_handlers.bert:handle",
    "resnet": "mmserve_handlers.resnet:handle",
}
#: Where the handlers look for weights, in this order.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
)

#: Sources looked at for the libraries they name; a model with more is taken to name them all.
_MAX_SOURCES = 200
_MAX_SOURCE_BYTES = 4 << 20
_MAX_WALKED = 5_000


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """A model's folder.

    Attributes:
        directory: that of the model itself; one folder deeper where an archive wraps its files.
        manifest: where there is none, an empty one, or what the files tell.
        top_names: modules and packages at the top, as `import` calls them.
        code_names: the same of the folder `code`.
    """

    directory: str
    manifest: Manifest
    top_names: list[str]
    code_names: list[str]


def read_layout(directory: Path, bounds: Path | None) -> Layout:
    """Finds the manifest and the modules.

    Args:
        directory: an unpacked archive, or a folder of the model store.
        bounds: links in it must not lead out of here; None where they may.

    Raises:
        InvalidModel: the manifest is unreadable or leads elsewhere.
        StorageFailed: the disk does not let us look.
    """
    found = _manifest_below(directory, bounds)
    top = _entries(directory)
    if found is None and (name := wrapper(top)) is not None:
        inner = directory / name
        if bounds is None or is_within(inner, bounds):
            found = _manifest_below(inner, bounds) or _guess(inner, bounds)
            if found is not None:
                directory, top = inner, _entries(inner)
    if found is None:
        found = _guess(directory, bounds)
    code = directory / "code"
    return Layout(
        directory=str(directory),
        manifest=found or Manifest(),
        top_names=_modules(directory, top),
        code_names=_modules(code, _entries(code)) if ("code", True) in top else [],
    )


def folder_names(directory: Path) -> list[str]:
    """Modules and packages in one folder; [] where there is no such folder."""
    return _modules(directory, _entries(directory)) if directory.is_dir() else []


def module_names_any(module: str, path: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a module that the model does not bring may hold one of the words.

    Args:
        path: folders that it is looked for in.

    Returns:
        False where there is no such module: loading the model will fail, and may fail soon. A
        package may import anything.
    """
    try:
        found = importlib.machinery.PathFinder.find_spec(module, list(path))
    except (ImportError, ValueError, OSError):
        return True
    if found is None:
        return False
    if found.submodule_search_locations is not None or not (found.origin or "").endswith(".py"):
        return True
    try:
        with Path(found.origin or "").open("rb") as source:
            text = source.read(_MAX_SOURCE_BYTES)
    except OSError:
        return True
    return len(text) == _MAX_SOURCE_BYTES or any(word.encode() in text for word in words)


def names_any(directory: Path, words: Sequence[str]) -> bool:
    """Whether a source below the folder holds one of the words, or may do."""
    sought = [word.encode() for word in words]
    budget = _MAX_SOURCE_BYTES
    sources = walked = 0
    try:
        for folder, _, names in os.walk(directory):
            walked += 1 + len(names)
            if walked > _MAX_WALKED:
                return True
            for name in names:
                if not name.endswith(".py"):
                    continue
                sources += 1
                if not Path(folder, name).is_file():
                    return True  # a pipe, which to open would be to wait, or who knows what
                with Path(folder, name).open("rb") as source:
                    text = source.read(budget + 1)
                budget -= len(text)
                if budget < 0 or sources > _MAX_SOURCES or any(word in text for word in sought):
                    return True
    except OSError:
        return True
    return False


def _manifest_below(directory: Path, bounds: Path | None) -> Manifest | None:
    for name, read in (("MAR-INF/MANIFEST.json", parse), ("MANIFEST.json", parse_legacy)):
        text = _text(directory / name, bounds)
        if text is not None:
            return read(text)
    return None


def _guess(directory: Path, bounds: Path | None) -> Manifest | None:
    """What a folder of weights tells of itself; None where it is none, or of a kind unknown."""
    if not any((directory / name).is_file() for name in WEIGHTS):
        return None
    text = _text(directory / "config.json", bounds)
    try:
        said = json.loads(text or "")
        handler = _HANDLERS.get(said["model_type"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    if handler is None:
        return None
    # The folder that an archive was unpacked into has a name of ours.
    is_own = bounds is not None and directory.resolve() == bounds
    return Manifest(guessed_name=None if is_own else directory.name, guessed_handler=handler)


def _text(path: Path, bounds: Path | None) -> str | None:
    try:
        if bounds is not None and not is_within(path, bounds):
            raise InvalidModel(f"{path.name} is a link that leads out of the model store.")
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise storage_failed("read", path, error) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise InvalidModel(f"{path.name} is larger than {MAX_MANIFEST_BYTES} bytes.")
    return data.decode("utf-8-sig", "replace")


def _entries(directory: Path) -> list[tuple[str, bool]]:
    try:
        with os.scandir(directory) as entries:
            return [(entry.name, entry.is_dir()) for entry in entries]
    except OSError as error:
        raise storage_failed("read", directory, error) from error


def _modules(directory: Path, entries: Sequence[tuple[str, bool]]) -> list[str]:
    return sorted(set(_importable(directory, entries)))


def _importable(directory: Path, entries: Sequence[tuple[str, bool]]) -> Iterator[str]:
    for name, is_folder in entries:
        if not is_folder:
            if (module := module_name(name)) is not None:
                yield module
        # A folder without `__init__` gives way to a real package further down the path.
        elif name.isidentifier() and any(
            module_name(inner) == "__init__" for inner, _ in _entries(directory / name)
        ):
            yield name
