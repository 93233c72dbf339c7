"""An archive that is being unpacked: its bytes, and what it may ask of us."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from mmserve.errors import InvalidModel
from mmserve.models.disk import storage_failed
from mmserve.models.limits import Limits

CHUNK_BYTES = 256 * 1024
#: Stored entries are copied in pieces of this size, by several threads.
SPAN_BYTES = 16 * 1024 * 1024
#: Compressed bytes read, and inflated bytes made, at a time: with more, isal grows buffers.
INFLATE_BYTES = 256 * 1024
INFLATED_BYTES = 128 * 1024


class Pacing(NamedTuple):
    """What whoever unpacks wants to be asked.

    Attributes:
        check: called between pieces; raises to give up.
        make_room: called with the bytes that are to come, as soon as they are known; frees disk
            space or raises StorageFailed.
    """

    check: Callable[[], None] = lambda: None
    make_room: Callable[[int], None] = lambda size: None


class Packed(NamedTuple):
    """The archive's descriptor, read at offsets so that threads can share it."""

    fd: int
    size: int
    name: str = ""  # for messages

    def at(self, offset: int, size: int) -> bytes:
        """Bytes at an offset; fewer at the end."""
        try:
            return os.pread(self.fd, size, offset)
        except OSError as error:
            raise storage_failed("read", self.name, error) from error

    def into(self, buffer: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.fd, [buffer], offset)
        except OSError as error:
            raise storage_failed("read", self.name, error) from error


def refuse_bomb(unpacked: int, packed: int, limits: Limits) -> None:
    """Raises InvalidModel where so many bytes are more than an archive of this size may hold."""
    most = limits.most(packed)
    if unpacked > most:
        raise bomb(most)


def bomb(most: int) -> InvalidModel:
    """What is said of an archive that unpacks to more than `most` bytes."""
    return InvalidModel(
        f"The archive is refused: it would unpack to more than {most} bytes, the most that one of "
        "its size may. Large tables of zeros are better stored uncompressed."
    )
