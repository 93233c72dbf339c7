"""`mmserve archive resnet`: makes an archive of a ResNet's weights that serves without code.

What is known of the weights is asked of `mmserve_handlers`, in a process of its own: it imports
torch, loads them as a worker will, and tells what they are or why they cannot be served. Without
torch the architecture must be said, and nothing is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

from mmserve.cli import archiving
from mmserve.cli.archiving import Refused

HANDLER = "mmserve_handlers.resnet:handle"
SUFFIXES = (".pt", ".pth", ".safetensors")
_NEEDED = ("torch", "torchvision", "mmserve_handlers")

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


class _Checked(NamedTuple):
    architecture: str
    labels: int
    images: list[int]  # what the network takes: channels, height, width


def main(argv: Sequence[str], *, on_written: Callable[[Path], object] | None = None) -> int:
    """The command. The exit code: 0, 1 for weights that cannot be served, 2 for wrong usage."""
    flags = _parser().parse_args(argv)
    source = Path(flags.weights)
    name = flags.name or (source.name if source.is_dir() else source.stem)

    def fill(folder: Path) -> None:
        _fill(folder, flags, source)

    return archiving.make(
        flags,
        name,
        HANDLER,
        check=lambda: _check_source(source),
        fill=fill,
        on_written=on_written,
    )


def _check_source(source: Path) -> None:
    if not source.exists():
        raise Refused(f"{source} does not exist")
    if source.is_file() and source.suffix not in SUFFIXES:
        raise Refused(f"{source} is none of {', '.join(SUFFIXES)}; rename it to what it is")
    if source.is_dir() and not (source / "config.json").is_file():
        raise Refused(
            f"{source} is a directory without config.json; give the file with the weights, or what "
            "save_pretrained of transformers wrote"
        )


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
    archiving.write_options(folder, said)
    if (missing := archiving.first_missing(_NEEDED)) is not None:
        if weights is not None and not flags.arch:
            raise Refused(
                f"{missing} is not installed, so the weights cannot be looked at; say which "
                "network they are of, like --arch resnet50"
            )
        print(f"WARNING - {missing} is missing: nothing was checked", file=sys.stderr)
        return
    ready = folder / "ready.pt"
    found = _checked(folder, ready if weights is not None else None)
    if weights is not None:
        said["architecture"] = found.architecture
        weights.unlink()
        ready.rename(folder / "model.pt")
        archiving.write_options(folder, said)
    many = f"{found.labels} labels" if found.labels else "no labels, features only"
    height, width = found.images[1:]
    print(f"{found.architecture}, {many}, images of {height} × {width}", file=sys.stderr)


def _said(flags: argparse.Namespace) -> dict[str, Any]:
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
    return archiving.given(said)


def _checked(folder: Path, weights: Path | None) -> _Checked:
    """What the handler says of the folder.

    Args:
        weights: where it writes the state dict, laid out for workers; None: nowhere.
    """
    words = [str(folder)] if weights is None else [str(folder), str(weights)]
    said = archiving.ask(["mmserve_handlers.resnet", *words], "the weights were")
    return _Checked(**json.loads(said))


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
    archiving.add_output(parser)
    return parser
