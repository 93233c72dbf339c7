"""`mmserve archive convert`: an archive whose weights workers can map, made of one whose cannot.

Files of torch.save become safetensors, in a process of its own (`convert_weights.py`) that runs
nothing of what they hold; everything else is kept as it is, names that lead to a converted file
in the manifest and in an index are changed, and the new archive is stored, not compressed.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from textwrap import dedent
from typing import Any, NamedTuple

from mmserve.cli import archiver
from mmserve.errors import ServeError

DONE, FAILED, USAGE = 0, 1, 2

_ENDINGS = (".bin", ".pt", ".pth")
_INDEX = ".bin.index.json"
#: What transformers' Trainer leaves beside a model: pickles that are no weights of it.
_NO_WEIGHTS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state*.pth")
_ARCHIVES = (".mar", ".model", ".zip")
_MAX_SOURCE_BYTES = 1 << 20

_TEXT = """\
    Makes an archive whose weights are mapped by workers, of one whose are read by each.

      mmserve archive convert bert.mar bert-safe.mar
      mmserve archive convert bert/ bert-safe/

    State dicts of torch.save (.bin, .pt, .pth) become safetensors; nothing in them is run. A file
    that is no state dict, and everything else, is kept as it is. pytorch_model.bin becomes
    model.safetensors; other files keep their name and get that ending. The manifest's
    serializedFile and an index follow; code that names a file does not, and is named.

    SOURCE is an archive or a directory and stays as it is. OUT is an archive (.mar), whose files
    are stored without compression, or a directory.

    Exit code 1 when a file cannot be converted, with the reason; then there is no OUT.
    """


class _Failed(Exception):
    """Why there is no archive, for the user."""


class _Usage(Exception):
    """What is wrong with the command line."""


class _File(NamedTuple):
    name: str  # in the archive, with slashes
    path: Path


def main(argv: Sequence[str], *, on_written: Callable[[Path], object] | None = None) -> int:
    """The command. The exit code: 0, 1 when it cannot be done, 2 for wrong usage."""
    flags = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _end)
    try:
        target = _convert(flags)
    except _Usage as error:
        print(f"mmserve archive convert: {error}", file=sys.stderr)
        return USAGE
    except (_Failed, ServeError, archiver.ArchiveError) as error:
        print(f"ERROR - {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"ERROR - {error.filename}: {error.strerror}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("ERROR - Interrupted; nothing was written.", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)
    if on_written is not None:
        on_written(target)
    return DONE


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


def _convert(flags: argparse.Namespace) -> Path:
    source, out = Path(flags.source), Path(flags.out)
    target = out.parent.resolve() / out.name
    if not source.exists():
        raise _Usage(f"{source} does not exist")
    if target.suffix in (".gz", ".tgz", ".tar"):
        raise _Usage(f"{target.name} would be compressed or a tar; name a .mar, or a directory")
    if source.is_dir() and target.is_relative_to(source.resolve()):
        raise _Usage(f"{target} lies in {source}; name another place")
    if not target.parent.is_dir():
        raise _Usage(f"{target.parent} is not a directory")
    if target.exists() and not flags.force:
        raise _Failed(f"{target} already exists; --force replaces it")
    prefix = f".{target.name}.{os.getpid()}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
        tree = source if source.is_dir() else _unpacked(source, Path(work, "source"))
        made = Path(work, "made")
        made.mkdir()
        files = _converted(list(_files(tree)), made, flags.keep)
        new = Path(work, "new")
        _write_zip(new, files) if target.suffix in _ARCHIVES else _write_folder(new, files)
        _put(new, target, Path(work, "replaced"))
    return target


def _unpacked(source: Path, folder: Path) -> Path:
    from mmserve.models.archive import unpack

    folder.mkdir()
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        unpack(fd, str(folder), name=source.name)
    finally:
        os.close(fd)
    return folder


def _files(tree: Path) -> Iterator[_File]:
    """Every file of a model, in alphabetical order. Raises _Failed."""
    for folder, folders, names in os.walk(tree):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in folders:
            if Path(folder, name).is_symlink():
                raise _Failed(f"{Path(folder, name)} is a link to a directory; copy that instead")
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_file():
                raise _Failed(f"{path} is no file and no directory")
            yield _File(path.relative_to(tree).as_posix(), path)


# Weights


def new_name(name: str) -> str:
    """What a file of weights is called once it is converted: `pytorch_model` becomes `model`.

    Source: the names that transformers looks for, single and in shards.
    """
    path = PurePosixPath(name)
    stem = re.sub(r"^pytorch_model(?=$|-\d+-of-\d+$)", "model", path.stem)
    return str(path.with_name(f"{stem}.safetensors"))


def _converted(files: list[_File], made: Path, keep: Sequence[str]) -> list[_File]:
    """The files of the new archive. Raises _Failed."""
    names = {file.name for file in files}
    kept = (*_NO_WEIGHTS, *keep)
    plan: list[tuple[_File, _File]] = []
    for file in files:
        if not file.name.endswith(_ENDINGS):
            continue
        base = PurePosixPath(file.name).name
        if any(fnmatch.fnmatchcase(base, each) or file.name == each for each in kept):
            _say(f"{file.name}: kept")
        elif new_name(file.name) in names:
            _say(f"{file.name}: kept, {new_name(file.name)} is there already")
        else:
            plan.append((file, _File(new_name(file.name), made / f"{len(plan)}.safetensors")))
    _refuse_doubles(plan)
    changed: dict[str, _File] = {}
    for (old, new), (outcome, note) in zip(plan, _child(plan), strict=True):
        if outcome == "refused":
            raise _Failed(f"{old.name}: {note}")
        if outcome == "converted":
            changed[old.name] = new
            _say(f"{old.name} → {new.name}" + (f": {note}" if note else ""))
        else:
            _say(f"{old.name}: kept, {note}")
    renamed = {old: new.name for old, new in changed.items()}
    rest = [changed.get(file.name) or _followed(file, renamed, made) for file in files]
    _warn_of_code(files, renamed)
    return sorted(rest)


def _refuse_doubles(plan: list[tuple[_File, _File]]) -> None:
    seen: dict[str, str] = {}
    for old, new in plan:
        if new.name in seen:
            raise _Failed(
                f"{seen[new.name]} and {old.name} would both become {new.name}; rename one, or "
                "keep it with --keep"
            )
        seen[new.name] = old.name


def _child(plan: list[tuple[_File, _File]]) -> list[tuple[str, str]]:
    """(outcome, note) of each file. Raises _Failed."""
    if not plan:
        return []
    order = [[str(old.path.absolute()), str(new.path)] for old, new in plan]
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "mmserve.cli.convert_weights"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            said, _ = child.communicate(json.dumps(order))
        except BaseException:
            child.kill()
            raise
    answers = [json.loads(line) for line in said.splitlines()]
    if child.returncode != 0 or len(answers) != len(plan):
        at = plan[min(len(answers), len(plan) - 1)][0].name
        how = f"status {child.returncode}"
        if child.returncode < 0:
            how = signal.Signals(-child.returncode).name
        raise _Failed(f"{at}: the process that converts it ended with {how}")
    return [(answer["outcome"], answer["note"]) for answer in answers]


def _followed(file: _File, renamed: dict[str, str], made: Path) -> _File:
    """The file, or a copy whose names follow those of converted files."""
    where = PurePosixPath(file.name)
    is_manifest = where.name == "MANIFEST.json" and where.parent.name == "MAR-INF"
    is_index = file.name.endswith(_INDEX)
    if not renamed or not (is_manifest or is_index):
        return file
    folder = where.parent.parent if is_manifest else where.parent

    def follow(name: Any) -> Any:
        new = renamed.get(str(folder / name)) if isinstance(name, str) else None
        return name if new is None else str(PurePosixPath(new).relative_to(folder))

    try:
        root = json.loads(file.path.read_bytes())
        named = root["model"] if is_manifest else root["weight_map"]
        for key in ("serializedFile",) if is_manifest else list(named):
            if key in named:
                named[key] = follow(named[key])
    except (ValueError, KeyError, TypeError, AttributeError):
        return file
    name = file.name
    if is_index:
        base = where.name.removesuffix(_INDEX)
        base = "model" if base == "pytorch_model" else base
        name = str(where.with_name(f"{base}.safetensors.index.json"))
    copy = made / f"{len(list(made.iterdir()))}.json"
    copy.write_text(json.dumps(root, indent=2))
    return _File(name, copy)


def _warn_of_code(files: Sequence[_File], renamed: dict[str, str]) -> None:
    for file in files:
        if not file.name.endswith((".py", ".json", ".yaml", ".yml")) or not renamed:
            continue
        if file.name.endswith(("MANIFEST.json", _INDEX)):
            continue
        with file.path.open("rb") as source:
            text = source.read(_MAX_SOURCE_BYTES)
        for old, new in renamed.items():
            base = PurePosixPath(old).name
            if re.search(rb"(?<![\w.-])" + re.escape(base.encode()) + rb"(?![\w.-])", text):
                _say(
                    f"WARNING: {file.name} names {base}, which is {PurePosixPath(new).name} now; "
                    "it must load that, with safetensors"
                )


# The new archive


def _write_zip(path: Path, files: Sequence[_File]) -> None:
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for file in files:
            status = file.path.stat()
            info = zipfile.ZipInfo.from_file(file.path, file.name, strict_timestamps=False)
            info.compress_type = zipfile.ZIP_STORED
            info.external_attr = (stat.S_IFREG | (status.st_mode & 0o777)) << 16
            with file.path.open("rb") as source, archive.open(info, "w") as entry:
                shutil.copyfileobj(source, entry, 1 << 20)


def _write_folder(path: Path, files: Sequence[_File]) -> None:
    path.mkdir()
    for file in files:
        copy = path / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path, copy)
        copy.chmod(file.path.stat().st_mode & 0o777 | stat.S_IWUSR)


def _put(new: Path, target: Path, aside: Path) -> None:
    """Moves it to its place; what is there is gone once that has worked."""
    if target.is_dir():  # a directory cannot be replaced by a rename
        target.rename(aside)
    try:
        new.rename(target)
    except BaseException:
        if aside.exists():
            with contextlib.suppress(OSError):
                aside.rename(target)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmserve archive convert",
        description=dedent(_TEXT),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="archive or directory")
    parser.add_argument("out", metavar="OUT", help="archive (.mar) or directory to be made")
    parser.add_argument(
        "--keep",
        metavar="PATTERN",
        action="append",
        default=[],
        help="files not to convert, by name; may be given several times",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace what is at OUT")
    return parser


def _say(text: str) -> None:
    print(text, file=sys.stderr)
