"""Unpacks a tar, gzipped or not, in one pass. tarfile reads the headers."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any

from mmserve.errors import InvalidModel
from mmserve.models import inflate
from mmserve.models.entries import Parts, Tree, parts_of, quoted
from mmserve.models.ground import Ground
from mmserve.models.limits import Limits
from mmserve.models.packed import (
    CHUNK_BYTES,
    INFLATE_BYTES,
    INFLATED_BYTES,
    Pacing,
    Packed,
    bomb,
    refuse_bomb,
)


def is_tar_header(block: bytes) -> bool:
    """By its checksum: the oldest form of tar has no magic number."""
    if len(block) < 512 or not block[0]:
        return False
    try:
        declared = int(block[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        return False
    return declared == sum(block[:148]) + 8 * 0x20 + sum(block[156:])


class _Stream:
    """A tar as tarfile wants to see it: read forwards once, headers of bounded size."""

    _MAX_HEADER_BYTES = 64 * 1024  # pax headers and long names come in one read

    def __init__(self, chunks: Iterator[bytes], most: int, pacing: Pacing) -> None:
        self._chunks, self._most, self._pacing = chunks, most, pacing
        self._ahead = memoryview(b"")
        self._offset = 0

    def tell(self) -> int:
        return self._offset

    def read(self, size: int) -> bytes:
        if size > self._MAX_HEADER_BYTES:
            raise InvalidModel("It is not a valid tar archive: a header is too long.")
        return b"".join(self.pieces(size))

    def skip_to(self, offset: int) -> None:
        if offset < self._offset:
            raise InvalidModel("It is not a valid tar archive: an entry has a negative size.")
        wanted = offset - self._offset
        if sum(len(piece) for piece in self.pieces(wanted)) < wanted:
            raise InvalidModel("It is not a valid tar archive: it is cut off.")

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next bytes; fewer at the end."""
        while size > 0 and self._fill():
            piece = self._ahead[:size]
            self._ahead = self._ahead[len(piece) :]
            self._offset += len(piece)
            size -= len(piece)
            yield piece

    def drain(self) -> None:
        """To the end, so that a checksum there is looked at."""
        while self._fill():
            self._offset += len(self._ahead)
            self._ahead = memoryview(b"")

    def _fill(self) -> bool:
        while not self._ahead:
            self._pacing.check()
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            if self._offset + len(chunk) > self._most:
                raise bomb(self._most)
            self._ahead = memoryview(chunk)
        return True


def unpack_tar(source: Packed, kind: str, ground: Ground, limits: Limits, pacing: Pacing) -> int:
    most = limits.most(source.size)
    chunks = _gunzipped(source) if kind == "tar.gz" else _plain(source)
    stream = _Stream(chunks, most, pacing)
    tree = Tree(limits.max_entries)
    total = 0
    for info in _tar_headers(stream, limits):
        parts = parts_of(info.name)
        if info.isdir():
            tree.add_folder(parts)
            ground.make_folder(parts)
        elif info.isreg() and not info.issparse():
            total += info.size
            refuse_bomb(total, source.size, limits)
            pacing.make_room(info.size)
            tree.add_file(parts)
            ground.make_folder(parts[:-1])
            _write_entry(stream, info, parts, ground)
        elif info.issym():
            tree.add_link(parts, info.linkname)
        elif info.islnk():
            original = parts_of(info.linkname)
            if original not in tree.files:
                raise InvalidModel(
                    f"The archive entry {quoted(info.name)} is refused: it is a hard link to "
                    f"{quoted(info.linkname)}, which is no file of this archive."
                )
            tree.add_file(parts)
            ground.make_folder(parts[:-1])
            ground.make_hard_link(original, parts)
        else:
            what = "a sparse file" if info.issparse() else "a device or a pipe"
            raise InvalidModel(f"The archive entry {quoted(info.name)} is refused: it is {what}.")
    stream.drain()
    tree.check_links()
    for parts, target in tree.links.items():
        ground.make_folder(parts[:-1])
        ground.make_link(parts, target)
    return total


def _tar_headers(stream: _Stream, limits: Limits) -> Iterator[tarfile.TarInfo]:
    """Each entry's header, parsed by tarfile, which takes a damaged one for the end; we do not."""
    source: Any = stream
    try:
        archive = tarfile.TarFile(fileobj=source, mode="r")  # reads the first header
    except tarfile.ReadError as error:
        raise InvalidModel(
            f"It is not a valid archive: a gzip file that holds no tar archive ({error})."
        ) from error
    info = archive.next()
    count = 0
    while info is not None:
        count += 1
        if count > limits.max_entries:
            raise InvalidModel(f"The archive holds more than {limits.max_entries} entries.")
        yield info
        stream.skip_to(archive.offset)
        try:
            info = tarfile.TarInfo.fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # not in the stubs
            return
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]  # not in the stubs
            raise InvalidModel("It is not a valid tar archive: it is cut off.") from None


def _write_entry(stream: _Stream, info: tarfile.TarInfo, parts: Parts, ground: Ground) -> None:
    written = 0
    with ground.new_file(parts, is_program=bool(info.mode & 0o111)) as write:
        for piece in stream.pieces(info.size):
            write(piece)
            written += len(piece)
    if written < info.size:
        raise InvalidModel("It is not a valid tar archive: it is cut off.")


def _plain(source: Packed) -> Iterator[bytes]:
    offset = 0
    while data := source.at(offset, CHUNK_BYTES):
        offset += len(data)
        yield data


def _gunzipped(source: Packed) -> Iterator[bytes]:
    """All members of a gzip file, one after the other, each with its checksum looked at.

    Source: RFC 1952. Zeros behind a member are padding (of tapes); what else follows the last one
    is ignored, as gzip does.
    """
    offset = 0

    def more() -> bytes:
        nonlocal offset
        data = source.at(offset, INFLATE_BYTES)
        offset += len(data)
        return data

    data = more()
    while data[:1] == b"\x1f":
        stream = inflate.gzip_inflater()
        while not stream.eof:
            if stream.needs_input and not data:
                data = more()
                if not data:
                    raise InvalidModel("It is not a valid tar.gz archive: it is cut off.")
            yield stream.decompress(data, INFLATED_BYTES)
            data = b""
        data = stream.unused_data.lstrip(b"\0")
        while not data and (block := more()):
            data = block.lstrip(b"\0")
