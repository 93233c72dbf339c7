"""Opens archives: zip, tar and gzipped tar, told apart by what they hold, not by their names.

An archive is somebody else's file. Names, sizes and links are checked before anything is written
(`entries.py`); files are made new, below descriptors of folders made here, and no link exists
before the last file is closed, so that nothing can lead a write elsewhere. Sizes that an archive
declares are an upper bound, never a promise: what inflates beyond them is refused.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tarfile
import zipfile
from collections.abc import Iterator

from mmserve.errors import InvalidModel, ServeError
from mmserve.models import inflate
from mmserve.models.ground import Ground
from mmserve.models.limits import Limits
from mmserve.models.packed import Pacing, Packed
from mmserve.models.untar import is_tar_header, unpack_tar
from mmserve.models.unzip import Window, unpack_zip


def unpack(
    fd: int,
    into: str,
    *,
    name: str = "the archive",
    limits: Limits | None = None,
    pacing: Pacing | None = None,
) -> int:
    """Unpacks an archive into an empty folder. After an error the folder holds a part of it.

    Args:
        fd: of the archive, a regular file; its position is left alone.
        into: a folder that nobody else writes to.
        name: what messages call the archive when it cannot be read.

    Returns:
        Bytes of all files.

    Raises:
        InvalidModel: it is not an archive, or not a safe one; the message says what was found.
        StorageFailed: the disk did not take it.
    """
    limits, pacing = limits or Limits(), pacing or Pacing()
    opener = {"zip": unpack_zip, "tar": unpack_tar, "tar.gz": unpack_tar}
    source = Packed(fd, os.fstat(fd).st_size, name)
    kind = _recognise(source)
    with Ground(into) as ground, _understood(kind):
        return opener[kind](source, kind, ground, limits, pacing)


def _recognise(source: Packed) -> str:
    """`zip`, `tar` or `tar.gz`. Raises InvalidModel, saying what it is instead."""
    head = source.at(0, 1024)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06")):
        return "zip"
    if head.startswith(b"\x1f\x8b"):
        return "tar.gz"
    if is_tar_header(head[:512]):
        return "tar"
    with contextlib.suppress(InvalidModel):
        if zipfile.is_zipfile(Window(source, limit=1 << 17)):  # a zip behind a script
            return "zip"
    raise InvalidModel(f"It is not a valid archive: {_describe(head)}, not a zip, tar or tar.gz.")


def _describe(head: bytes) -> str:
    if not head:
        return "the file is empty"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "it is an HTML page"
    if start.startswith((b"<?xml", b"<error")):
        return "it is an XML document"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file it stands for"
    for magic, name in _OTHERS.items():
        if head.startswith(magic):
            return f"it is a {name} file"
    if not head.strip(b"\0"):
        return "it holds zero bytes"
    return "it holds other binary data" if any(byte < 9 for byte in head) else "it is a text file"


_OTHERS = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"(\xb5/\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!": "rar",
    b"\x80\x02": "pickle",
    b"\x80\x04": "pickle",
    b"\x89HDF": "HDF5",
    b"\x7fELF": "program",
    b"%PDF": "PDF",
}


_BROKEN: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    tarfile.TarError,
    *inflate.ERRORS,
    struct.error,
    NotImplementedError,  # zipfile: a newer version of the format
    ValueError,  # both: numbers that are none, text in no encoding
    OverflowError,
    IndexError,
    EOFError,
    RecursionError,  # tarfile: a header about a header about a header …
)


@contextlib.contextmanager
def _understood(kind: str) -> Iterator[None]:
    """Whatever a parser says about a broken archive becomes InvalidModel."""
    try:
        yield
    except ServeError:
        raise
    except MemoryError:
        raise InvalidModel(f"The {kind} archive wants more memory than it may have.") from None
    except _BROKEN as error:
        cause = str(error) or type(error).__name__
        raise InvalidModel(f"It is not a valid {kind} archive: {cause}.") from error
