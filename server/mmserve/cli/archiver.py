"""`model-archiver`: makes a model archive of a directory, as Multi Model Server's does.

The archive is written beside its place under another name and renamed when it is whole, so that a
failure leaves neither a part of it nor a copy of the model anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import stat
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

NAME = r"^[A-Za-z0-9][A-Za-z0-9_\-.]*$"

#: Files this large are looked at before they are compressed: weights hardly shrink, and a model
#: whose weights are stored loads several times faster.
_LARGE_BYTES = 1 << 20
# fmt: off
_WEIGHTS = frozenset((
    ".bin", ".ckpt", ".gguf", ".h5", ".model", ".npy", ".npz", ".onnx", ".params", ".pb", ".pt",
    ".pth", ".safetensors", ".tflite",
))
# fmt: on
_SAMPLE_BYTES = 64 * 1024
_WORTH_IT = 0.9  # of its size; a sample that shrinks to more than this is stored

_LEFT_OUT_FOLDERS = ("__MACOSX", "__pycache__")
_LEFT_OUT_ENDINGS = (".pyc", ".DS_Store", ".mar")
_COPY_BYTES = 1 << 20
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class ArchiveError(Exception):
    """What went wrong, in words for the user."""


class Member(NamedTuple):
    name: str  # in the archive, with slashes
    path: Path
    status: os.stat_result


def main(
    argv: Sequence[str] | None = None, *, on_written: Callable[[Path], object] | None = None
) -> int:
    """The command. The exit code: 0, 1 for an error of ours, 2 for a wrong command line.

    `on_written` gets the archive's path; `model-archiver` itself says nothing.
    """
    arguments = _parser().parse_args(argv)
    with _interruptions() as interrupted:
        try:
            target = _archive(arguments)
        except ArchiveError as error:
            _say("ERROR", str(error))
            return 1
        except OSError as error:
            _say("ERROR", f"{error.filename or arguments.model_path}: {error.strerror or error}")
            return 1
        except BaseException:
            # Not only KeyboardInterrupt: zipfile, when it is left in the middle of a member, may
            # raise an error of its own in the place of what interrupted it.
            if not interrupted:
                raise
            _say("ERROR", "Interrupted; nothing was written.")
            return 128 + interrupted[0]
    if on_written is not None:
        on_written(target)
    return 0


@contextlib.contextmanager
def _interruptions() -> Iterator[list[int]]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, the first time; the number is in the list."""
    interrupted: list[int] = []

    def interrupt(number: int, _: object) -> None:
        if not interrupted:  # a second one must not disturb the cleaning up
            interrupted.append(number)
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _INTERRUPTS}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _archive(arguments: argparse.Namespace) -> Path:
    """The path of what was written."""
    name, source = arguments.model_name, Path(arguments.model_path)
    if not re.fullmatch(NAME, name):
        raise ArchiveError(
            "Model name contains special characters.\n"
            f"The allowed regular expression filter for model name is: {NAME}"
        )
    if not source.is_dir():
        raise ArchiveError(
            f"Given model-path {source} is not a valid directory. "
            "Point to a valid model-path directory."
        )
    export = Path(arguments.export_path or Path.cwd())
    if not export.is_dir():
        raise ArchiveError(
            f"Given export-path {export} is not a directory. "
            "Point to a valid export-path directory."
        )
    ending, write = _FORMATS[arguments.archive_format]
    target = export.absolute() / f"{name}{ending}"
    _refuse_existing(target, force=arguments.force)
    members = list(_members(source, target))
    if arguments.convert and any(member.name.endswith(".onnx") for member in members):
        raise ArchiveError(
            "--convert turns an .onnx file into MXNet files, and MXNet is not supported. "
            "Without it the .onnx file is packed as it is."
        )
    with _whole_or_nothing(target) as partial:
        write(partial, name, members, manifest(name, arguments.handler, arguments.runtime))
    return target


def manifest(name: str, handler: str, runtime: str) -> str:
    """Text of `MAR-INF/MANIFEST.json`, keys in Multi Model Server's order."""
    fields = {
        "runtime": runtime,
        "model": {"modelName": name, "handler": handler},
        "modelServerVersion": "1.0",
        "implementationVersion": "1.0",
        "specificationVersion": "1.0",
    }
    return json.dumps(fields, indent=2)


def _members(source: Path, target: Path) -> Iterator[Member]:
    """What goes in, in alphabetical order."""
    for folder, folders, files in os.walk(source, onerror=_raise):
        for name in sorted(folders):
            if Path(folder, name).is_symlink() and not _is_left_out_folder(name):
                _say("WARNING", f"{Path(folder, name)} is a link to a directory and is left out.")
        folders[:] = sorted(
            name
            for name in folders
            if not _is_left_out_folder(name) and Path(folder, name).absolute() != target
        )
        for name in sorted(files):
            path = Path(folder, name)
            if name == "MANIFEST.json" or name.endswith(_LEFT_OUT_ENDINGS):
                continue
            if path.absolute() == target:
                continue  # an earlier archive, where the model's directory is the export path
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ArchiveError(f"{path} is neither a file nor a directory.")
            yield Member(path.relative_to(source).as_posix(), path, status)


def _is_left_out_folder(name: str) -> bool:
    return name.startswith(".") or name in _LEFT_OUT_FOLDERS


# Formats


def _write_zip(partial: Path, name: str, members: Sequence[Member], manifest_text: str) -> None:
    with zipfile.ZipFile(partial, "x", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            info = zipfile.ZipInfo.from_file(member.path, member.name, strict_timestamps=False)
            info.external_attr = (stat.S_IFREG | (member.status.st_mode & 0o777)) << 16
            with member.path.open("rb") as file:
                is_stored = hardly_shrinks(file, member.path.suffix, member.status.st_size)
                info.compress_type = zipfile.ZIP_STORED if is_stored else zipfile.ZIP_DEFLATED
                with archive.open(info, "w") as entry:
                    shutil.copyfileobj(file, entry, _COPY_BYTES)
        archive.writestr("MAR-INF/MANIFEST.json", manifest_text)


def hardly_shrinks(file: io.BufferedIOBase, suffix: str, size: int) -> bool:
    """Whether compressing a file is a waste. Its position is at the start afterwards."""
    if size < _LARGE_BYTES:
        return False
    if suffix.lower() in _WEIGHTS:
        return True
    before = after = 0
    for offset in (0, size // 2, size - _SAMPLE_BYTES):
        file.seek(offset)
        sample = file.read(_SAMPLE_BYTES)
        before += len(sample)
        after += len(zlib.compress(sample, 1))
    file.seek(0)
    return after > _WORTH_IT * before


def _write_tgz(partial: Path, name: str, members: Sequence[Member], manifest_text: str) -> None:
    # Level 1: weights hardly shrink at any, and 6 takes three times as long.
    with tarfile.open(partial, "x:gz", compresslevel=1) as archive:
        for member in members:
            info = tarfile.TarInfo(f"{name}/{member.name}")
            info.size, info.mtime = member.status.st_size, int(member.status.st_mtime)
            info.mode = member.status.st_mode & 0o777
            with member.path.open("rb") as file:
                archive.addfile(info, file)
        data = manifest_text.encode()
        info = tarfile.TarInfo(f"{name}/MAR-INF/MANIFEST.json")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))


def _write_folder(partial: Path, name: str, members: Sequence[Member], manifest_text: str) -> None:
    partial.mkdir()
    for member in members:
        copy = partial / member.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(member.path, copy)
        copy.chmod(member.status.st_mode & 0o777 | stat.S_IWUSR)
    (partial / "MAR-INF").mkdir(exist_ok=True)
    (partial / "MAR-INF/MANIFEST.json").write_text(manifest_text)


_Write = Callable[[Path, str, Sequence[Member], str], None]
_FORMATS: dict[str, tuple[str, _Write]] = {
    "default": (".mar", _write_zip),
    "tgz": (".tar.gz", _write_tgz),
    "no-archive": ("", _write_folder),
}


# The place it goes to


def _refuse_existing(target: Path, *, force: bool) -> None:
    if not target.exists():
        return
    if not force:
        raise ArchiveError(
            f"{target} already exists.\n"
            "Please specify --force/-f option to overwrite the model archive output file.\n"
            "See -h/--help for more details."
        )
    _say("WARNING", f"Overwriting {target} ...")


@contextlib.contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """A path to write to. It becomes the target if all goes well, and is gone if it does not."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.replaced")
    try:
        yield partial
        if target.is_dir():  # a directory cannot be replaced by a rename
            target.rename(replaced)
        partial.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    finally:
        for path in (partial, replaced):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


# The command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Makes a model archive of a directory with a model and its handler.",
    )
    parser.add_argument(
        "--model-name",
        required=True,
        help="name of the model, and of the file: {model-name}.mar",
    )
    parser.add_argument(
        "--model-path",
        required=True,
        help="directory with everything that the model needs: handler, weights, vocabulary",
    )
    parser.add_argument(
        "--handler",
        required=True,
        help="where a prediction begins: module:function, or a module with one class",
    )
    parser.add_argument(
        "--runtime",
        default="python",
        choices=("python", "python2", "python3"),
        help="what the handler runs in (default: python)",
    )
    parser.add_argument(
        "--export-path", help="directory that the archive is put in (default: the current one)"
    )
    parser.add_argument(
        "--archive-format",
        default="default",
        choices=tuple(_FORMATS),
        help="default: {model-name}.mar, a zip whose weights are stored as they are; tgz: "
        "{model-name}.tar.gz, as SageMaker takes it; no-archive: a directory {model-name}",
    )
    parser.add_argument(
        "-f", "--force", action="store_true", help="replace an archive that is there already"
    )
    parser.add_argument(
        "-c",
        "--convert",
        action="store_true",
        help="not supported: turned an .onnx file into MXNet files",
    )
    return parser


def _say(level: str, text: str) -> None:
    print(f"{level} - {text}", file=sys.stderr)


def _raise(error: OSError) -> NoReturn:
    raise error


if __name__ == "__main__":
    sys.exit(main())
