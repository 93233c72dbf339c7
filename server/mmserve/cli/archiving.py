"""What `mmserve archive bert` and `mmserve archive resnet` do alike."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmserve.cli import archiver

FAILED = 1
#: Loading takes seconds; a disk that hangs must not hang the command for ever.
_LIMIT_S = 600.0


class Refused(Exception):
    """Why there is no archive, for the user."""


def make(
    flags: argparse.Namespace,
    name: str,
    handler: str,
    *,
    check: Callable[[], None],
    fill: Callable[[Path], None],
    on_written: Callable[[Path], object] | None,
) -> int:
    """Makes the archive. The exit code: 0, or 1 with the reason on standard error.

    Args:
        flags: with those of `add_output`.
        name: of the model.
        check: raises Refused before anything is done.
        fill: puts all that the archive holds into a folder. Raises Refused.
    """
    try:
        check()
        if not re.fullmatch(archiver.NAME, name):
            raise Refused(f"{name!r} cannot be a model's name; give another with --name")
        with tempfile.TemporaryDirectory(prefix="mmserve-archive-") as folder:
            fill(Path(folder))
            words = ["--model-name", name, "--model-path", folder, "--handler", handler]
            words += ["--archive-format", flags.archive_format]
            words += ["--export-path", flags.export_path] if flags.export_path else []
            words += ["--force"] if flags.force else []
            return archiver.main(words, on_written=on_written)
    except Refused as why:
        print(f"ERROR - {why}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"ERROR - {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED


def ask(module_and_words: Sequence[str], loaded: str, said: str = "") -> str:
    """What a module of the handlers prints. Raises Refused with its reason.

    Args:
        loaded: what it loads, "the model was" say, for the message when that takes too long.
        said: its standard input.
    """
    command = [sys.executable, "-I", "-m", *module_and_words]
    try:
        ran = subprocess.run(
            command, input=said, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Refused(f"{loaded} not loaded within {_LIMIT_S:.0f} s") from None
    if ran.returncode == 0:
        return ran.stdout
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    raise Refused(lines[-1] if lines else f"the check ended with {ran.returncode}")


def first_missing(modules: Iterable[str]) -> str | None:
    """The first that is not installed."""
    return next((name for name in modules if importlib.util.find_spec(name) is None), None)


def given(said: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into model.json; whatever is not said has the handler's default."""
    return {key: value for key, value in said.items() if value is not None}


def write_options(folder: Path, said: Mapping[str, Any]) -> None:
    """Writes model.json, where there is something to say."""
    if said:
        (folder / "model.json").write_text(json.dumps(said, indent=2) + "\n")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Where the archive goes, and as what."""
    parser.add_argument("--export-path", metavar="DIR", help="where it goes (default: here)")
    parser.add_argument(
        "--archive-format", default="default", choices=("default", "tgz", "no-archive")
    )
    parser.add_argument(
        "-f", "--force", action="store_true", help="replace an archive that is there already"
    )
