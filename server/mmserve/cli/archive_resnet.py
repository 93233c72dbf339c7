"""`mmserve archive resnet`: makes an archive of a ResNet's weights that serves without code.

What is known of the weights is asked of `mmserve_handlers`, in a process of its own: it imports
torch, loads them as a worker will, and tells what they are or why they cannot be served. Without
torch the architecture must be said, and nothing is checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

from mmserve.cli import archiver

HANDLER = "mmserve_handlers.resnet:handle"
SUFFIXES = (".pt", ".pth", ".safetensors")
_NEEDED = ("torch", "torchvision", "mmserve_handlers")
FAILED, USAGE = 1, 2
#: Loading and one image take seconds; a disk that hangs must not hang the command for ever.
_LIMIT_S = 600.0

_TEXT = """\
    Makes a model archive of the weights of a ResNet; no code is needed.

      mmserve archive resnet resnet50.pth --labels labels.txt
      mmserve archive resnet best.pt --labels labels.txt --resize 232
      mmserve archive resnet digits.pt --size 16 --mean 0.5 --std 0.25 --name digits
      mmserve archive resnet microsoft-resnet-50/

    WEIGHTS is a state dict (torch.save(model.state_dict(), FILE), or safetensors), or the
    directory that transformers' save_pretrained wrote. The architecture is read from the weights,
    and they are loaded once, as a worker does it; that needs torch. Without torch say --arch.
    What is archived is the weights alone, laid out so that workers share one copy of them.

    Exit code 1 when they cannot be served, with the reason.
    """


class _Refused(Exception):
    """Why there is no archive, for the user."""


class _Checked(NamedTuple):
    architecture: str
    labels: int
    images: list[int]  # what the network takes: channels, height, width


def main(argv: Sequence[str], *, on_written: Callable[[Path], object] | None = None) -> int:
    """The command. The exit code: 0, 1 for weights that cannot be served, 2 for wrong usage."""
    flags = _parser().parse_args(argv)
    source = Path(flags.weights)
    name = flags.name or (source.name if source.is_dir() else source.stem)
    try:
        _check_usage(flags, source, name)
        with tempfile.TemporaryDirectory(prefix="mmserve-archive-") as folder:
            _fill(Path(folder), flags, source)
            words = ["--model-name", name, "--model-path", folder, "--handler", HANDLER]
            words += ["--archive-format", flags.archive_format]
            words += ["--export-path", flags.export_path] if flags.export_path else []
            words += ["--force"] if flags.force else []
            return archiver.main(words, on_written=on_written)
    except _Refused as why:
        print(f"ERROR - {why}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"ERROR - {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED


def _check_usage(flags: argparse.Namespace, source: Path, name: str) -> None:
    if not source.exists():
        raise _Refused(f"{source} does not exist")
    if source.is_file() and source.suffix not in SUFFIXES:
        raise _Refused(f"{source} is none of {', '.join(SUFFIXES)}; rename it to what it is")
    if source.is_dir() and not (source / "config.json").is_file():
        raise _Refused(
            f"{source} is a directory without config.json; give the file with the weights, or what "
            "save_pretrained of transformers wrote"
        )
    if not re.fullmatch(archiver.NAME, name):
        raise _Refused(f"{name!r} cannot be a model's name; give another with --name")


def _fill(folder: Path, flags: argparse.Namespace, source: Path) -> None:
    """Puts everything that the archive holds into a folder, and has it checked."""
    said = _said(flags)
    if source.is_dir():
        for file in sorted(source.iterdir()):
            if file.suffix in (".json", ".safetensors", ".bin") and file.name != "model.json":
                (folder / file.name).symlink_to(file.absolute())
        weights = None
    else:
        suffix = ".pt" if source.suffix == ".pth" else source.suffix
        weights = folder / f"model{suffix}"
        weights.symlink_to(source.absolute())
    if flags.labels == "imagenet":
        said["labels"] = "imagenet"
    elif flags.labels is not None:
        (folder / "labels.txt").write_bytes(Path(flags.labels).read_bytes())
    _write(folder, said)
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        if weights is not None and not flags.arch:
            raise _Refused(
                f"{missing[0]} is not installed, so the weights cannot be looked at; say which "
                "network they are of, like --arch resnet50"
            )
        print(f"WARNING - {missing[0]} is missing: nothing was checked", file=sys.stderr)
        return
    ready = folder / "ready.pt"
    found = _checked(folder, ready if weights is not None else None)
    if weights is not None:
        said["architecture"] = found.architecture
        weights.unlink()
        ready.rename(folder / "model.pt")
        _write(folder, said)
    many = f"{found.labels} labels" if found.labels else "no labels, features only"
    height, width = found.images[1:]
    print(f"{found.architecture}, {many}, images of {height} × {width}", file=sys.stderr)


def _said(flags: argparse.Namespace) -> dict[str, Any]:
    """What goes into model.json; whatever is not said has the handler's default."""
    said = {
        "architecture": flags.arch,
        "resize": flags.resize,
        "crop": flags.crop,
        "size": flags.size,
        "mean": flags.mean,
        "std": flags.std,
        "full_scale": flags.full_scale,
        "task": flags.task,
        "top_k": flags.top_k,
    }
    return {key: value for key, value in said.items() if value is not None}


def _write(folder: Path, said: dict[str, Any]) -> None:
    if said:
        (folder / "model.json").write_text(json.dumps(said, indent=2) + "\n")


def _checked(folder: Path, weights: Path | None) -> _Checked:
    """What the handler says of the folder.

    Args:
        weights: where it writes the state dict, laid out for workers; None: nowhere.
    """
    command = [sys.executable, "-I", "-m", "mmserve_handlers.resnet", str(folder)]
    command += [str(weights)] if weights is not None else []
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _Refused(f"the weights were not loaded within {_LIMIT_S:.0f} s") from None
    if ran.returncode == 0:
        return _Checked(**json.loads(ran.stdout))
    lines = [line for line in ran.stderr.splitlines() if line.strip()]
    raise _Refused(lines[-1] if lines else f"the check ended with {ran.returncode}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmserve archive resnet",
        description=dedent(_TEXT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("weights", metavar="WEIGHTS")
    parser.add_argument(
        "--labels",
        metavar="FILE",
        help="text file, a label on each line, in the order of the outputs; or imagenet",
    )
    parser.add_argument(
        "--arch",
        metavar="NAME",
        help="resnet18, resnet34, resnet50, … (default: what the weights are)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="of the model, and of the file (default: like WEIGHTS)"
    )
    images = parser.add_argument_group("images, as in training")
    images.add_argument(
        "--resize", type=int, metavar="PIXELS", help="short side before the crop (default: 256)"
    )
    images.add_argument("--crop", type=int, metavar="PIXELS", help="side of the cut (default: 224)")
    images.add_argument(
        "--size", type=int, metavar="PIXELS", help="scale to a square, in the place of these two"
    )
    images.add_argument("--mean", type=float, nargs="+", metavar="NUMBER", help="one or three")
    images.add_argument("--std", type=float, nargs="+", metavar="NUMBER", help="one or three")
    images.add_argument(
        "--full-scale", type=float, metavar="NUMBER", help="brightest of rows of numbers (255)"
    )
    answers = parser.add_argument_group("answers, where a request does not say")
    answers.add_argument("--task", choices=("classify", "features"))
    answers.add_argument("--top-k", type=int, metavar="N", help="labels of an image (default: 3)")
    parser.add_argument("--export-path", metavar="DIR", help="where it goes (default: here)")
    parser.add_argument(
        "--archive-format", default="default", choices=("default", "tgz", "no-archive")
    )
    parser.add_argument(
        "-f", "--force", action="store_true", help="replace an archive that is there already"
    )
    return parser
