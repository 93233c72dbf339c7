"""`mmserve archive bert`: makes an archive of a folder of BERT weights that serves without code.

What the folder holds is asked of `mmserve_handlers`, in a process of its own: it loads the model as
a worker will, and tells what it serves or why it cannot. Without torch only what is said on the
command line is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from mmserve.cli import archiving
from mmserve.cli.archiving import Refused
from mmserve.models.layout import WEIGHTS

HANDLER = "mmserve_handlers.bert:handle"
_LOADED = "the model was"
_NEEDED = ("torch", "transformers", "safetensors")
_TASKS = (
    "embeddings",
    "question-answering",
    "text-classification",
    "token-classification",
    "fill-mask",
)
#: Beside the weights; what a folder has else (other frameworks' weights, README) is left out.
_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
_POOLING = "*Pooling/config.json"

_TEXT = """\
    Makes a model archive of a folder of BERT weights; no code is needed.

      mmserve archive bert path/to/minilm
      mmserve archive bert path/to/squad-bert --name squad --precision amp
      mmserve archive bert path/to/reviews --labels negative,positive --top-k 2

    FOLDER is what save_pretrained of transformers or sentence-transformers wrote, or a snapshot of
    the Hugging Face hub. What the model is asked comes from the architecture in its config.json.
    The model is loaded once, as a worker does it; that needs torch.

    Exit code 1 when it cannot be served, with the reason.
    """


def main(argv: Sequence[str], *, on_written: Callable[[Path], object] | None = None) -> int:
    """The command. The exit code: 0, 1 for a folder that cannot be served, 2 for wrong usage."""
    flags = _parser().parse_args(argv)
    source = Path(flags.folder)
    name = flags.name or source.resolve().name

    def check() -> None:
        if not source.is_dir():
            raise Refused(f"{source} is no directory; give the one with config.json in it")

    def fill(folder: Path) -> None:
        _fill(folder, flags, source)

    return archiving.make(flags, name, HANDLER, check=check, fill=fill, on_written=on_written)


def _fill(folder: Path, flags: argparse.Namespace, source: Path) -> None:
    """Puts everything that the archive holds into a folder, and has it checked."""
    for file in _files(source):
        place = folder / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(file.absolute())
    said = _options(source / "model.json") | _said(flags)
    archiving.write_options(folder, said)
    archiving.ask(["mmserve_handlers.options"], _LOADED, json.dumps(said))
    if (missing := archiving.first_missing(_NEEDED)) is not None:
        print(f"WARNING - {missing} is missing: the weights were not looked at", file=sys.stderr)
        return
    found = archiving.ask(["mmserve_handlers.bert", str(folder)], _LOADED)
    print(found.strip(), file=sys.stderr)


def _files(source: Path) -> Iterator[Path]:
    for name in _FILES:
        if (source / name).is_file():
            yield source / name
    yield from source.glob(_POOLING)
    for name in WEIGHTS:
        path = source / name
        if path.is_file():
            yield path
            if name.endswith(".index.json"):
                yield from _parts(path)
            return


def _parts(index: Path) -> Iterator[Path]:
    """The files that an index names; whether they are all there is checked with the weights."""
    try:
        names = {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    for name in sorted(names):
        if (index.parent / name).is_file():
            yield index.parent / name


def _options(path: Path) -> dict[str, Any]:
    """What the folder's own model.json says; the command line wins over it."""
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as wrong:
        raise Refused(f"model.json is not JSON ({wrong})") from None
    if not isinstance(said, dict):
        raise Refused("model.json must hold an object")
    return said


def _said(flags: argparse.Namespace) -> dict[str, Any]:
    said = {
        "task": flags.task,
        "labels": None if flags.labels is None else _labels(flags.labels),
        "precision": flags.precision,
        "device": flags.device,
        "max_length": flags.max_length,
        "top_k": flags.top_k,
        "aggregation_strategy": flags.aggregation_strategy,
        "normalize": flags.normalize,
        "warmup": flags.warmup,
    }
    return archiving.given(said)


def _labels(text: str) -> list[str]:
    path = Path(text)
    if path.is_file():
        return [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    return [label.strip() for label in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmserve archive bert",
        description=dedent(_TEXT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument(
        "--name", metavar="NAME", help="of the model, and of the file (default: like FOLDER)"
    )
    parser.add_argument(
        "--task", choices=_TASKS, help="what it is asked (default: what its architecture is for)"
    )
    parser.add_argument(
        "--labels",
        metavar="A,B,…",
        help="of the classes, in the order of the weights; or a text file, a label on each line",
    )
    running = parser.add_argument_group("how it runs")
    running.add_argument("--precision", choices=("auto", "fp32", "amp"))
    running.add_argument("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N")
    running.add_argument("--max-length", type=int, metavar="TOKENS", help="of one pass at most")
    running.add_argument("--warmup", type=int, metavar="N", help="passes before it is ready (1)")
    answers = parser.add_argument_group("answers, where a request does not say")
    answers.add_argument("--top-k", type=int, metavar="N", help="results of an input")
    answers.add_argument(
        "--aggregation-strategy", choices=("none", "simple", "first", "average", "max")
    )
    answers.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, help="embeddings have length 1"
    )
    archiving.add_output(parser)
    return parser
