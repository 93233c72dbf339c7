"""Chunked bodies undone. Pure: bytes in, the body's bytes and what follows it out.

llhttp could do this, but httptools does not say where in the data a message ended, and behind the
end may stand the next request.

Source: RFC 9112, section 7.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum

from mmserve.errors import BodyTooLarge
from mmserve.frontend.head import refused

#: Chunk extensions and trailers, which nobody reads, of one body.
MAX_EXTRAS_BYTES = 8192

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_QUOTED = rb'"(?:[\t\x20\x21\x23-\x5b\x5d-\x7e\x80-\xff]|\\[\t\x20-\x7e\x80-\xff])*"'
_EXTENSION = rb";" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?"
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:" + _EXTENSION + rb")*")
_PLAIN_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_TRAILER = re.compile(_TOKEN + rb":[\t\x20-\x7e\x80-\xff]*")


class _Part(Enum):
    SIZE = "a chunk size"
    DATA = "data"
    DATA_END = "the line end behind the data of a chunk"
    TRAILER = "a trailer field"


class Chunks:
    """One chunked body.

    Args:
        limit_bytes: of the body, de-chunked.
    """

    __slots__ = ("_begun", "_extras", "_left", "_limit", "_part", "_room")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._room = limit_bytes
        self._part = _Part.SIZE
        self._left = 0  # bytes of the present chunk
        self._begun = b""  # of a line whose end has not come
        self._extras = 0

    def feed(self, data: bytes, put: Callable[[bytes], object]) -> bytes | None:
        """Hands the body's bytes in `data` to `put`, in order.

        Returns:
            None while the body goes on; once it is complete, what follows it.

        Raises:
            BadRequest: the coding is malformed.
            BodyTooLarge: a chunk was announced that goes beyond the limit.
        """
        at = 0
        while at < len(data):
            if self._part is _Part.SIZE and not self._begun:
                at = self._take_whole(data, at, put)
            if self._part is _Part.DATA:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                put(piece)
                if not self._left:
                    self._part = _Part.DATA_END
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._begun += data[at:]
                self._check_begun()
                return None
            line = self._begun + data[at:end]
            self._begun = b""
            at = end + 1
            if self._is_last(line):
                return data[at:]
        return None

    def _take_whole(self, data: bytes, at: int, put: Callable[[bytes], object]) -> int:
        """Takes the chunks that lie in `data` as a whole and without extensions, as nearly all do.

        Nothing else is done for them: a body in chunks of a byte each must not cost the front's
        only thread half a second for each read.

        Returns:
            where the first one begins that is different, or the data ends.
        """
        while line := _PLAIN_SIZE_LINE.match(data, at):
            begin, size = line.end(), int(line[1], 16)
            end = begin + size
            if not size or size > self._room or data[end : end + 2] != b"\r\n":
                break
            put(data[begin:end])
            self._room -= size
            at = end + 2
        return at

    def _is_last(self, line: bytes) -> bool:
        """Takes a line, its LF cut off, and tells whether it ends the body."""
        if not line.endswith(b"\r"):
            raise refused(f"A bare LF in {self._part.value}")
        line = line[:-1]
        if self._part is _Part.DATA_END:
            if line:
                raise refused("A chunk is longer than its size says")
            self._part = _Part.SIZE
        elif self._part is _Part.SIZE:
            self._begin_chunk(line)
        elif not line:
            return True
        else:
            if not _TRAILER.fullmatch(line):
                raise refused("A trailer field is malformed")
            self._spend(len(line) + 2)
        return False

    def _begin_chunk(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if not match:
            raise refused("A chunk size is malformed")
        self._spend(len(line) - match.end(1))
        self._left = int(match[1], 16)
        if self._left > self._room:
            raise BodyTooLarge(self._limit)
        self._room -= self._left
        self._part = _Part.DATA if self._left else _Part.TRAILER

    def _check_begun(self) -> None:
        """Refuses the beginning of a line as early as its end would be."""
        begun = self._begun
        if b"\r" in begun[:-1]:
            raise refused(f"A bare CR in {self._part.value}")
        if self._part is _Part.DATA_END and begun not in (b"", b"\r"):
            raise refused("A chunk is longer than its size says")
        if len(begun) > MAX_EXTRAS_BYTES:
            raise refused(f"A line in a chunked body is longer than {MAX_EXTRAS_BYTES} bytes")

    def _spend(self, extra: int) -> None:
        self._extras += extra
        if self._extras > MAX_EXTRAS_BYTES:
            raise refused(f"Chunk extensions and trailers exceed {MAX_EXTRAS_BYTES} bytes")
