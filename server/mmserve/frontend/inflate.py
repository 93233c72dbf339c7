"""Gzip bodies undone within a limit. Pure: compressed bytes in, the body's bytes out."""

from __future__ import annotations

import functools
import zlib
from typing import Any, Protocol

from mmserve.errors import BadRequest, BodyTooLarge

_GZIP = 16 + zlib.MAX_WBITS

#: Names of the one coding we undo. Source: RFC 9110, section 8.4.1.3.
GZIP_NAMES = frozenset(("gzip", "x-gzip"))


class _Stream(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    @property
    def unconsumed_tail(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes: ...


class Inflater:
    """One gzip body: a member, or several in a row (RFC 1952, section 2.2).

    Never holds more than `limit_bytes` + 1 bytes of output, whatever the input promises.

    Args:
        limit_bytes: of the output in all.
    """

    __slots__ = ("_limit", "_room", "_stream")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = self._room = limit_bytes
        self._stream = _open()

    def feed(self, data: bytes) -> bytes:
        """The next piece of the body.

        Raises:
            BadRequest: this is not gzip.
            BodyTooLarge: the output goes beyond the limit.
        """
        pieces = []
        while data:
            if self._stream.eof:
                self._stream = _open()  # another member
            try:
                piece = self._stream.decompress(data, self._room + 1)
            except _codec().error as error:
                raise _not_gzip(str(error)) from None
            self._room -= len(piece)
            if self._room < 0:
                raise BodyTooLarge(self._limit)
            pieces.append(piece)
            data = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def finish(self) -> None:
        """Raises BadRequest when the last member is cut off."""
        if not self._stream.eof:
            raise _not_gzip("it ends too early")


@functools.cache
def _codec() -> Any:
    """isal's zlib, two to three times as fast; Python's own where it is missing."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


def _open() -> _Stream:
    stream: _Stream = _codec().decompressobj(_GZIP)
    return stream


def _not_gzip(why: str) -> BadRequest:
    return BadRequest(f"The body is not the gzip that Content-Encoding announces: {why}.")
