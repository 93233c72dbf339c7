"""Products in 16 bits where that is quicker, everything delicate in 32.

`torch.autocast` casts every weight anew on every call. Here the weights of linear layers and
convolutions are cast once, into a *prepared file* that is then only mapped, so that workers share
its pages; layers cast what comes in to the type of their weights. Layer norms, the softmax, the
embeddings and the last layers stay in float32: that is where 16 bits show.

A prepared file is named by the content of the weights and by what was made of them. It is written
under another name and renamed, so that whoever sees it sees it whole. Where it lies:
`prepared_dir` of the context's system properties, or MMSERVE_PREPARED_DIR, which the server sets; a
model's own folder may be read-only and is never written to. Without either the weights are cast in
memory, each worker has its own copy, and the log says so. Prepared files take a fifth of the disk's
free space at most; those that were used longest ago go first, and who has one mapped keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from mmserve_handlers import weights

VARIABLE, PROPERTY = "MMSERVE_PREPARED_DIR", "prepared_dir"
#: Part of every name: a new number where what is made of the same weights changes.
_FORM = 1
#: 16 bits must win clearly: they cost accuracy, and a short measurement errs.
_CLEARLY = 1.25
_ROUNDS = 5
#: Of the disk's free space, prepared files counted as free.
_SHARE = 0.2
log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------- which


def chosen(precision: str, device: torch.device, folder: Path | None = None) -> torch.dtype:
    """The type of products: float32, or one of 16 bits.

    Args:
        precision: "fp32", "amp", or "auto": on a GPU 16 bits, on a CPU what a timed product says.
        folder: of prepared files, where the product's time is remembered for other workers.
    """
    if precision == "fp32":
        return torch.float32
    low = low_type(device)
    if precision == "auto" and device.type == "cpu" and not _is_quicker_by_note(low, folder):
        return torch.float32
    return low


def _is_quicker_by_note(low: torch.dtype, folder: Path | None) -> bool:
    """As `is_quicker`; measured once for all workers on one machine that share a folder."""
    if folder is None:
        return is_quicker(low)
    known = (torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())
    name = hashlib.sha256(repr((known, platform.node(), low)).encode()).hexdigest()[:40]
    note = folder / f"quicker-{name}"
    with contextlib.suppress(OSError):
        if (said := note.read_text()) in ("yes", "no"):
            return said == "yes"
    answer = is_quicker(low)
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _note(note, "yes" if answer else "no")
    return answer


def low_type(device: torch.device) -> torch.dtype:
    """bfloat16, which has the range of float32; float16 on a GPU that has no bfloat16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


@functools.cache
def is_quicker(low: torch.dtype) -> bool:
    """Whether this CPU multiplies matrices clearly quicker in 16 bits; measured once, in ms."""
    exact_s = _product_s(torch.float32)
    low_s = _product_s(low, limit_s=2 * exact_s * _ROUNDS)
    log.info("a product takes %.2f ms in float32, %.2f ms in %s", exact_s * 1e3, low_s * 1e3, low)
    return low_s * _CLEARLY < exact_s


def _product_s(kind: torch.dtype, limit_s: float = 1.0) -> float:
    """The quickest of some products of a size that BERTs have.

    Args:
        limit_s: no further round after so long: where 16 bits are emulated they take very long.
    """
    rows, matrix = torch.ones(64, 768, dtype=kind), torch.ones(768, 768, dtype=kind)
    best = total = 0.0
    with torch.inference_mode():
        functional.linear(rows[:1], matrix)  # sets up what the first call needs
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            functional.linear(rows, matrix)
            took = time.perf_counter() - start
            best = min(best, took) if best else took
            total += took
            if total > limit_s:
                break
    return best


# ------------------------------------------------------------------------------- layers


class _LowLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input.to(self.weight.dtype), self.weight, self.bias)


class _ExactLinear(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear(input.float(), self.weight, self.bias)


class _LowConv2d(torch.nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        low = input.to(self.weight.dtype)
        found: torch.Tensor = self._conv_forward(low, self.weight, self.bias)
        return found


class _ExactLayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.float())


_LOW: Mapping[type, type] = {torch.nn.Linear: _LowLinear, torch.nn.Conv2d: _LowConv2d}
_EXACT: Mapping[type, type] = {
    torch.nn.Linear: _ExactLinear,
    torch.nn.LayerNorm: _ExactLayerNorm,
}


def types_of(
    model: torch.nn.Module, kind: torch.dtype, exact: Sequence[str] = ()
) -> dict[str, torch.dtype]:
    """The type that each parameter of floats is wanted in.

    Args:
        model: on the meta device or not; as `lower` will get it.
        kind: of products: float32 or of 16 bits.
        exact: modules that stay in float32, by the beginnings of their names.
    """
    types = {
        name: torch.float32
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }
    for name, module in model.named_modules():
        if type(module) in _LOW and not name.startswith(tuple(exact)):
            types |= {f"{name}.{own}": kind for own, _ in module.named_parameters(recurse=False)}
    return types


def lower(model: torch.nn.Module, kind: torch.dtype, exact: Sequence[str] = ()) -> None:
    """Has a model's layers cast what comes in to the type of their weights.

    Args:
        model: its parameters have, or will get, the types of `types_of`.
        kind, exact: as in `types_of`; with float32 nothing is changed.
    """
    if kind == torch.float32:
        return
    for name, module in model.named_modules():
        is_exact = name.startswith(tuple(exact)) or type(module) not in _LOW
        layer = (_EXACT if is_exact else _LOW).get(type(module))
        if layer is not None:
            module.__class__ = layer


# ------------------------------------------------------------------------------- prepared files


def folder_of(properties: Mapping[str, Any]) -> Path | None:
    """Where prepared files lie; None where nobody says."""
    named = properties.get(PROPERTY) or os.environ.get(VARIABLE)
    return Path(named) if isinstance(named, str) and named else None


def prepared(
    state: Mapping[str, torch.Tensor],
    types: Mapping[str, torch.dtype],
    sources: Sequence[Path],
    folder: Path | None,
) -> dict[str, torch.Tensor]:
    """A state dict whose tensors have these types; what has it already is left as it is.

    Args:
        state: mapped from `sources`.
        types: by name; all names are in `state`.
        folder: of prepared files, made where it is not there; None: casts in memory.
    """
    wrong = {name: kind for name, kind in types.items() if state[name].dtype != kind}
    if not wrong:
        return dict(state)
    # Two names of one tensor are cast once, and stay one.
    first: dict[tuple[int, torch.dtype], str] = {}
    same = {name: first.setdefault((id(state[name]), kind), name) for name, kind in wrong.items()}

    def cast() -> dict[str, torch.Tensor]:
        return {name: state[name].to(wrong[name]).contiguous() for name in first.values()}

    made = None
    if folder is None:
        log.warning(
            "weights are cast in memory, and each worker has its own copy of them; "
            "with %s workers would share one",
            VARIABLE,
        )
    else:
        try:
            made = _from_file(folder, _key(wrong, sources, folder), cast)
        except OSError as error:
            log.warning("no prepared file in %s (%s); weights are cast in memory", folder, error)
    made = cast() if made is None else made
    return {**state, **{name: made[origin] for name, origin in same.items()}}


def _from_file(
    folder: Path, key: str, cast: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The tensors of a prepared file, which is made where it is not there. Raises OSError."""
    path = folder / f"{key}.safetensors"
    if (found := _mapped(path)) is not None:
        return found
    with _locked(folder / ".lock"):
        if (found := _mapped(path)) is not None:  # somebody made it meanwhile
            return found
        tensors = cast()
        make_room(folder, sum(tensor.nbytes for tensor in tensors.values()))
        _write(path, tensors)
    try:
        return weights.load_files([path])
    except weights.BadWeights as wrong:
        raise OSError(str(wrong)) from None


def _mapped(path: Path) -> dict[str, torch.Tensor] | None:
    """What is in a prepared file; None where it is not there, or damaged."""
    with contextlib.suppress(OSError, weights.BadWeights):
        os.utime(path)  # used now, which keeps it for longest
        return weights.load_files([path])
    return None


def make_room(folder: Path, needed: int, free: int | None = None) -> None:
    """Removes prepared files, those used longest ago first, until a new one fits.

    Args:
        needed: bytes of the new one.
        free: bytes that the disk has left; asked of it where nothing is said.

    Raises:
        OSError: it does not fit even alone.
    """
    files = [(path, path.stat()) for path in folder.glob("*.safetensors")]
    files.sort(key=lambda file: file[1].st_mtime_ns)
    taken = sum(status.st_size for _, status in files)
    free = shutil.disk_usage(folder).free if free is None else free
    limit = int(_SHARE * (free + taken))
    if needed > limit:
        raise OSError(f"it needs {needed} bytes, and prepared files may take {limit}")
    for path, status in files:
        if taken + needed <= limit:
            return
        path.unlink(missing_ok=True)
        taken -= status.st_size


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial)
        partial.replace(path)
    except SafetensorError as wrong:
        raise OSError(f"it cannot be written: {wrong}") from None
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; also where the one before was killed."""
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(types: Mapping[str, torch.dtype], sources: Sequence[Path], folder: Path) -> str:
    """The name of a prepared file: of the content it was made of, and what was made. OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = hashlib.sha256(repr((_FORM, sorted((n, str(t)) for n, t in types.items()))).encode())
    content = hashlib.sha256("".join(_digest(path, folder) for path in sources).encode())
    return f"{content.hexdigest()[:40]}-{made.hexdigest()[:16]}"


def _digest(path: Path, folder: Path) -> str:
    """SHA-256 of a file; remembered for as long as the file is not touched."""
    status = path.stat()
    looks = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    note = folder / f"digest-{hashlib.sha256(repr(looks).encode()).hexdigest()[:40]}"
    with contextlib.suppress(OSError):
        known = note.read_text()
        if len(known) == 64:
            return known
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _note(note, digest)
    return digest


def _note(path: Path, text: str) -> None:
    """Writes a small file, whole or not at all. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)
