"""Weights as they lie in a file: mapped, not read, so that every worker shares the same pages.

    model.safetensors                  tensors lie in the file as they lie in memory
    model.safetensors.index.json       several such files, and which tensor is in which
    pytorch_model.bin, model.pt        what `torch.save` writes of a state dict

Nothing is unpickled but tensors (`weights_only`). A `.bin` that torch wrote before version 1.6 has
no form that could be mapped: it is read, each worker has its own copy, and the log says so.
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

#: Where weights are looked for, in this order.
NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
)
#: Where trainers put the state dict when they save more beside it.
_STATE_KEYS = ("state_dict", "model_state_dict", "model")
_GIT_LFS = b"version https://git-lfs"
log = logging.getLogger(__name__)


class BadWeights(ValueError):
    """Weights that cannot be served; the message says what is wrong and what to do."""


def files(folder: Path, names: Sequence[str] = NAMES) -> list[Path]:
    """The files that hold a model's weights.

    Args:
        folder: the model's.
        names: what they may be called; the first that is there counts. `.index.json` lists others.

    Raises:
        BadWeights: none is there, or an index names one that is not.
    """
    for name in names:
        path = folder / name
        if path.is_file():
            return _shards(path) if name.endswith(".index.json") else [path]
    listed = ", ".join(name for name in names if not name.endswith(".index.json"))
    raise BadWeights(
        f"the archive has no weights; looked for {listed}. "
        "model.save_pretrained(folder) writes model.safetensors"
    )


def load_state(folder: Path, names: Sequence[str] = NAMES) -> dict[str, torch.Tensor]:
    """All tensors of a model by name, mapped from its files.

    Raises:
        BadWeights: as `files`; or a file is damaged, or no state dict.
    """
    return load_files(files(folder, names))


def load_files(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The tensors of these files. Raises BadWeights."""
    state: dict[str, torch.Tensor] = {}
    for path in paths:
        is_safe = path.suffix == ".safetensors"
        state |= _safetensors(path) if is_safe else _pickled(path)
    return state


def _shards(index: Path) -> list[Path]:
    try:
        named = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        paths = [index.parent / Path(name).name for name in named]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadWeights(f'{index.name} is damaged: it has no "weight_map" of file names') from None
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise BadWeights(
            f"{index.name} names {', '.join(missing) or 'no file'}, which the archive does not "
            "have; copy all files of the model"
        )
    return paths


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state: dict[str, torch.Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError) as wrong:
        raise _damaged(path, wrong) from None
    return state


def _pickled(path: Path) -> dict[str, torch.Tensor]:
    is_mappable = zipfile.is_zipfile(path)
    if is_mappable and _is_torchscript(path):
        raise BadWeights(
            f"{path.name} is TorchScript, not tensors by name; "
            f"torch.save(model.state_dict(), {path.name!r}) writes what is needed"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about files that are none
            said = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable)
    except Exception as wrong:  # of a damaged file it raises whatever its unpickler runs into
        if isinstance(wrong, pickle.UnpicklingError) and "weights_only" in str(wrong).lower():
            raise _no_state(path) from None
        raise _damaged(path, wrong) from None
    if not is_mappable:
        log.warning(
            "%s is of torch's old format and cannot be mapped: each worker has its own copy. "
            "Save it as model.safetensors",
            path.name,
        )
    for key in _STATE_KEYS if isinstance(said, Mapping) else ():
        if isinstance(said.get(key), Mapping):
            said = said[key]
            break
    if not isinstance(said, Mapping) or not said or not all(map(_is_tensor, said.values())):
        raise _no_state(path)
    return {str(name): tensor for name, tensor in said.items()}


def _is_torchscript(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as inside:
            return any(name.endswith("/constants.pkl") for name in inside.namelist())
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False  # whoever loads it will say what is wrong


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _no_state(path: Path) -> BadWeights:
    return BadWeights(
        f"{path.name} holds something else than tensors by name, and nothing else is unpickled; "
        f"torch.save(model.state_dict(), {path.name!r}) writes what is needed"
    )


def _damaged(path: Path, wrong: Exception) -> BadWeights:
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_GIT_LFS)) == _GIT_LFS
        size = path.stat().st_size
    except OSError as unreadable:
        return BadWeights(f"{path.name} cannot be read: {unreadable.strerror}")
    if is_pointer:
        return BadWeights(
            f"{path.name} is a pointer of Git LFS and not the weights; `git lfs pull` fetches them"
        )
    said = " ".join(str(wrong).split())[:200]
    return BadWeights(
        f"{path.name} is damaged or cut short ({size} bytes: {said}); copy it again from its source"
    )


def fill(model: torch.nn.Module, state: Mapping[str, torch.Tensor], *, hint: str = "") -> None:
    """Makes tensors the parameters of a model that was built on the meta device; copies nothing.

    Args:
        model: in evaluation mode from here on.
        state: by the model's own names; what the model does not know is left out.
        hint: what to do where something does not fit; ends the message.

    Raises:
        BadWeights: as `check`.
    """
    check(model, state, hint=hint)
    wanted = model.state_dict()
    model.requires_grad_(False)
    model.load_state_dict({name: state[name] for name in wanted}, assign=True)
    model.eval()


def check(model: torch.nn.Module, state: Mapping[str, torch.Tensor], *, hint: str = "") -> None:
    """Raises BadWeights where a tensor of the model is missing, or has another shape."""
    wanted = model.state_dict()
    missing = sorted(wanted.keys() - state.keys())
    hint = f". {hint}" if hint else ""
    if missing:
        many = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadWeights(f"the weights have no {missing[0]}{many}{hint}")
    for name, tensor in wanted.items():
        if tensor.shape != state[name].shape:
            raise BadWeights(
                f"{name} has the shape {tuple(state[name].shape)} in the weights, and "
                f"{tuple(tensor.shape)} by the configuration{hint}"
            )
