"""Unpacks a zip. zipfile reads its directory; the entries are read here, by several threads."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mmserve.errors import InvalidModel
from mmserve.models import inflate
from mmserve.models.entries import Parts, Tree, parts_of, quoted
from mmserve.models.ground import Ground, Write
from mmserve.models.limits import Limits
from mmserve.models.packed import (
    CHUNK_BYTES,
    INFLATE_BYTES,
    INFLATED_BYTES,
    SPAN_BYTES,
    Pacing,
    Packed,
    refuse_bomb,
)

#: Enough to keep up with a disk, and all that a small host has.
_THREADS = min(2, os.cpu_count() or 1)
#: Files that are cut up at most: each is open until all are done.
_MOST_OPEN = 64


class _Member(NamedTuple):
    parts: Parts
    info: zipfile.ZipInfo
    data_offset: int


_LOCAL_HEADER = struct.Struct("<4s22xHH")  # APPNOTE.TXT 4.3.7: signature, name and extra lengths


def unpack_zip(source: Packed, kind: str, ground: Ground, limits: Limits, pacing: Pacing) -> int:
    infos = _zip_directory(source, limits)
    declared = sum(info.file_size for info in infos)
    refuse_bomb(declared, source.size, limits)
    tree = Tree(limits.max_entries)
    members: list[_Member] = []
    links: list[_Member] = []
    spans: list[tuple[int, int]] = []
    for info in infos:
        parts = parts_of(info.orig_filename)
        mode = _unix_mode(info)
        if info.orig_filename.endswith(("/", "\\")) or stat.S_ISDIR(mode):
            tree.add_folder(parts)
            continue
        _refuse_member(info, mode)
        member = _Member(parts, info, _data_offset(source, info))
        spans.append((info.header_offset, member.data_offset + info.compress_size))
        if stat.S_ISLNK(mode):
            tree.add_link(parts, os.fsdecode(b"".join(_contents(source, member))))
            links.append(member)
        else:
            tree.add_file(parts)
            members.append(member)
    tree.check_links()
    _refuse_overlap(spans, source.size)
    pacing.make_room(declared)
    for folder in sorted(tree.folders):
        ground.make_folder(folder)
    _write_members(source, members, ground, pacing)
    for link in links:
        ground.make_link(link.parts, tree.links[link.parts])
    return declared


def _zip_directory(source: Packed, limits: Limits) -> list[zipfile.ZipInfo]:
    window: Any = Window(source, limits.max_directory_bytes)
    try:
        with zipfile.ZipFile(window) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise InvalidModel(
            "It is not a valid zip archive: it is cut off or damaged, its directory is missing "
            f"({error})."
        ) from error
    if len(infos) > limits.max_entries:
        raise InvalidModel(f"The archive holds more than {limits.max_entries} entries.")
    return infos


def _unix_mode(info: zipfile.ZipInfo) -> int:
    return info.external_attr >> 16 if info.create_system == 3 else 0


def _refuse_member(info: zipfile.ZipInfo, mode: int) -> None:
    name = quoted(info.orig_filename)
    if info.flag_bits & 0x1:
        raise InvalidModel(f"The archive entry {name} is encrypted.")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidModel(
            f"The archive entry {name} is compressed by method {info.compress_type}; only deflate "
            "(8) and none (0) can be read."
        )
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFLNK):
        raise InvalidModel(f"The archive entry {name} is refused: it is a device or a pipe.")
    if stat.S_ISLNK(mode) and info.file_size > 4096:
        raise InvalidModel(f"The link {name} in the archive has an impossible target.")


def _data_offset(source: Packed, info: zipfile.ZipInfo) -> int:
    is_inside = 0 <= info.header_offset <= source.size - _LOCAL_HEADER.size
    header = source.at(info.header_offset, _LOCAL_HEADER.size) if is_inside else b""
    if len(header) < _LOCAL_HEADER.size:
        raise zipfile.BadZipFile("it is cut off")
    signature, name_size, extra_size = _LOCAL_HEADER.unpack(header)
    if signature != b"PK\x03\x04":
        raise zipfile.BadZipFile(
            f"the entry {quoted(info.orig_filename)} is not where it should be"
        )
    return info.header_offset + _LOCAL_HEADER.size + int(name_size) + int(extra_size)


def _refuse_overlap(spans: list[tuple[int, int]], size: int) -> None:
    """Entries that share their bytes let a small file unpack to petabytes.

    Source: Fifield, A better zip bomb, 2019.
    """
    reached = 0
    for start, end in sorted(spans):
        if start < reached:
            raise InvalidModel("The archive is refused: its entries overlap.")
        reached = end
    if reached > size:
        raise InvalidModel("It is not a valid zip archive: it is cut off.")


def _contents(source: Packed, member: _Member) -> Iterator[bytes | memoryview]:
    """The bytes of one entry, checked for size and CRC. A piece is good until the next one."""
    info = member.info
    crc = written = 0
    pieces = _stored if info.compress_type == zipfile.ZIP_STORED else _inflated
    for piece in pieces(source, member.data_offset, info.compress_size):
        written += len(piece)
        if written > info.file_size:
            break
        crc = inflate.crc32(piece, crc)
        yield piece
    if written != info.file_size or crc != info.CRC:
        raise _damaged(info)


def _stored(source: Packed, offset: int, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
    while size:
        count = source.into(buffer[:size], offset)
        if not count:
            raise zipfile.BadZipFile("it is cut off")
        yield buffer[:count]
        offset += count
        size -= count


def _inflated(source: Packed, offset: int, size: int) -> Iterator[bytes]:
    stream = inflate.deflate_inflater()
    while not stream.eof:
        data = b""
        if stream.needs_input:
            data = source.at(offset, min(size, INFLATE_BYTES))
            if not data:
                raise zipfile.BadZipFile("an entry is cut off")
            offset += len(data)
            size -= len(data)
        yield stream.decompress(data, INFLATED_BYTES)


class _Span(NamedTuple):
    """A piece of a stored entry, from `start` to `end` in it."""

    start: int
    end: int


def _write_members(source: Packed, members: list[_Member], ground: Ground, pacing: Pacing) -> None:
    """Unpacks them in a few threads; those that are large and stored are cut up between these."""
    combine = inflate.crc32_combine
    works: list[Callable[[], None]] = []
    with contextlib.ExitStack() as files:
        checks: list[Callable[[], None]] = []
        # The largest first, so that no thread is left with it at the end.
        for member in sorted(members, key=lambda member: member.info.compress_size, reverse=True):
            info = member.info
            is_large = info.compress_type == zipfile.ZIP_STORED and info.file_size > SPAN_BYTES
            if combine is None or not is_large or len(checks) == _MOST_OPEN:
                works.append(partial(_write_member, source, member, ground, pacing))
                continue
            if info.compress_size != info.file_size:
                raise _damaged(info)
            write = files.enter_context(ground.new_file(member.parts, is_program=_is_program(info)))
            spans = [
                _Span(start, min(start + SPAN_BYTES, info.file_size))
                for start in range(0, info.file_size, SPAN_BYTES)
            ]
            crcs: dict[_Span, int] = {}
            works += [
                partial(_copy_span, source, member, span, write, crcs, pacing) for span in spans
            ]
            checks.append(partial(_check_spans, info, spans, crcs, combine))
        _share_out(works)
        for check in checks:
            check()


def _copy_span(
    source: Packed,
    member: _Member,
    span: _Span,
    write: Write,
    crcs: dict[_Span, int],
    pacing: Pacing,
) -> None:
    crc, at = 0, span.start
    for piece in _stored(source, member.data_offset + at, span.end - at):
        pacing.check()
        crc = inflate.crc32(piece, crc)
        write(piece, at)
        at += len(piece)
    crcs[span] = crc


def _check_spans(
    info: zipfile.ZipInfo,
    spans: Sequence[_Span],
    crcs: Mapping[_Span, int],
    combine: Callable[[int, int, int], int],
) -> None:
    crc = 0
    for span in spans:
        crc = combine(crc, crcs[span], span.end - span.start)
    if crc != info.CRC:
        raise _damaged(info)


def _damaged(info: zipfile.ZipInfo) -> InvalidModel:
    return InvalidModel(
        f"It is not a valid zip archive: the entry {quoted(info.orig_filename)} is damaged."
    )


def _is_program(info: zipfile.ZipInfo) -> bool:
    return bool(_unix_mode(info) & 0o111)


def _write_member(source: Packed, member: _Member, ground: Ground, pacing: Pacing) -> None:
    with ground.new_file(member.parts, is_program=_is_program(member.info)) as write:
        for piece in _contents(source, member):
            pacing.check()
            write(piece)


def _share_out(works: Sequence[Callable[[], None]]) -> None:
    """Does all of them in a few threads; raises the first error."""
    queue = iter(works)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            with lock:
                work = next(queue, None)
            if work is None:
                return
            try:
                work()
            except BaseException as error:
                errors.append(error)

    helpers = [
        threading.Thread(target=run, name="unpack") for _ in range(min(_THREADS, len(works)) - 1)
    ]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


class Window:
    """The archive as zipfile wants to see it, with a limit on what is read at once."""

    def __init__(self, source: Packed, limit: int) -> None:
        self._source, self._limit, self._offset = source, limit, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = 0) -> int:
        offset += (0, self._offset, self._source.size)[whence]
        if offset < 0:
            # What zipfile expects of a file that is shorter than its footer.
            raise OSError(errno.EINVAL, "negative offset")
        self._offset = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._source.size - self._offset)
        size = left if size < 0 else min(size, left)
        if size > self._limit:
            raise InvalidModel(
                f"The zip archive's directory is larger than {self._limit} bytes: too many entries."
            )
        data = self._source.at(self._offset, size)
        self._offset += len(data)
        return data
