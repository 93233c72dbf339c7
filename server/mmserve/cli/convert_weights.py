"""`python -I -m mmserve.cli.convert_weights`: turns files of torch.save into safetensors.

The half of `mmserve archive convert` that needs torch, in a process of its own. Reads one JSON
list of `[source, target]` paths from the standard input, and writes one JSON object a line for
each to the standard output: {"outcome": "converted", "kept" or "refused", "note": …}.

Nothing in a file is run: it is unpickled with `weights_only`. Tensors are mapped from the source
and written one by one, so that no model need fit into memory.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmserve.runtime.torchserve.pickles import needed_code

# Source: the safetensors format, https://github.com/huggingface/safetensors#format
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_HEADER_ALIGNMENT = 8
_CHUNK_BYTES = 64 << 20
_OLD_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."  # torch.save before 1.6, pickled


class Kept(Exception):
    """It is no state dict, and nothing is wrong with that. The text says what it is."""


class Refused(Exception):
    """It cannot be converted. The text says why, and what to do."""


def convert(source: str, target: str) -> str:
    """Converts one file. Returns what the user should know of it, or "".

    Raises:
        Kept, Refused: it was not converted; there is no target.
    """
    state, note = _state(source)
    tensors = {}
    for key, value in state.items():
        tensors[key] = _plain(key, value)
    try:
        write(tensors, target)
        _check(target, set(tensors))
    except BaseException:
        Path(target).unlink(missing_ok=True)
        raise
    notes = [note, _sharing(tensors)]
    return "; ".join(filter(None, notes))


def kind_of(source: str) -> str:
    """What a file is: "mapped" or "old" for torch.save's two forms, "script", or "other"."""
    with open(source, "rb") as file:
        head = file.read(64)
    if _OLD_MAGIC in head:
        return "old"
    if not head.startswith(b"PK\x03\x04"):
        return "other"
    try:
        with zipfile.ZipFile(source) as archive:
            names = [name.partition("/")[2] for name in archive.namelist()]
    except (zipfile.BadZipFile, ValueError):
        return "other"
    if "constants.pkl" in names:
        return "script"
    return "mapped" if "data.pkl" in names else "other"


def _state(source: str) -> tuple[Mapping[str, Any], str]:
    import torch

    kind = kind_of(source)
    if kind == "script":
        raise Kept("it is a TorchScript program")
    if kind == "other":
        raise Kept("torch.save has not written it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storages of the old kind
            loaded = torch.load(
                source, map_location="cpu", weights_only=True, mmap=kind == "mapped"
            )
    except pickle.UnpicklingError as error:
        if (code := needed_code(error)) is None:
            raise Refused(f"it is damaged ({_line(error)})") from None
        raise Refused(
            f"it can be read only by running code that it names ({code}), which is not "
            "done. Save the weights alone, with torch.save(model.state_dict(), …); or keep the "
            "file as it is, with --keep"
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
        raise Refused(f"it is damaged ({_line(error)})") from None
    return _tensors_of(loaded)


def _tensors_of(loaded: Any) -> tuple[Mapping[str, Any], str]:
    if isinstance(loaded, Mapping):
        if _is_state(loaded):
            return loaded, ""
        inner: Any = loaded.get("state_dict")
        if _is_state(inner):
            others = ", ".join(sorted(str(key) for key in loaded if key != "state_dict"))
            return inner, f"only its state_dict is converted, without {others}" if others else ""
    raise Kept("it holds something else than tensors by name")


def _is_state(value: Any) -> bool:
    import torch

    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and key != "__metadata__" for key in value)
        and all(isinstance(each, torch.Tensor) for each in value.values())
    )


def _plain(key: str, tensor: Any) -> Any:
    """A dense tensor on the CPU. Raises Refused."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_meta:
        raise Refused(f"{key} is no dense tensor, which safetensors cannot hold")
    if name not in _DTYPES:
        raise Refused(f"{key} has the type {name}, which safetensors does not know")
    # A conjugate or negative view has its sign in a flag, not in memory.
    return tensor.detach().resolve_conj().resolve_neg()


def _sharing(tensors: Mapping[str, Any]) -> str:
    """Safetensors has no two names for one place: such tensors are written out under each."""
    seen: dict[int, str] = {}
    twice: list[str] = []
    size = 0
    for key, tensor in tensors.items():
        if not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        size += tensor.numel() * tensor.element_size()
        if storage.data_ptr() in seen:
            twice.append(f"{key} with {seen[storage.data_ptr()]}")
        else:
            seen[storage.data_ptr()] = key
            size -= storage.nbytes()
    if not twice or size <= 0:
        return ""
    shown = ", ".join(twice[:3]) + (", …" if len(twice) > 3 else "")
    return f"shared tensors are written out for each name: {shown} ({size / 1e6:.1f} MB more)"


def write(tensors: Mapping[str, Any], target: str) -> None:
    """Writes a safetensors file, one tensor in memory at a time at most.

    Types with larger elements come first, so that each tensor begins at a multiple of its own.
    """
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        tensor, start = tensors[key], end
        end += tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": _DTYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with open(target, "xb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for key in order:
            for piece in _bytes_of(tensors[key]):
                file.write(piece)


def _bytes_of(tensor: Any) -> Iterator[memoryview]:
    import torch

    if not tensor.numel():
        return
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    for at in range(0, len(flat), _CHUNK_BYTES):
        yield memoryview(flat[at : at + _CHUNK_BYTES])


def _check(target: str, names: set[str]) -> None:
    """Opens what was written with the library that will read it."""
    from safetensors import safe_open

    with safe_open(target, framework="pt") as written:
        if set(written.keys()) != names:
            raise AssertionError(f"{target} does not hold what was written")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200].rstrip(". ") or type(error).__name__


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print; nothing of that is an answer
    missing = [name for name in ("torch", "safetensors") if not _has(name)]
    for source, target in json.load(sys.stdin):
        outcome, note = "converted", ""
        if missing:
            outcome, note = "refused", f"this needs {missing[0]}; pip install 'mmserve[handlers]'"
        else:
            try:
                note = convert(source, target)
            except Kept as kept:
                outcome, note = "kept", str(kept)
            except Refused as refused:
                outcome, note = "refused", str(refused)
            except OSError as error:
                outcome, note = "refused", error.strerror or str(error)
        print(json.dumps({"outcome": outcome, "note": note}), file=answers, flush=True)
    return 0


def _has(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    sys.exit(main())
