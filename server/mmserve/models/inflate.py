"""Deflate and CRC: isal where it is there, two to three times as fast, else zlib."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol, cast

try:
    from isal import igzip_lib, isal_zlib

    HAS_ISAL = True
except ImportError:  # a platform without it
    HAS_ISAL = False


class Inflater(Protocol):
    """One deflate stream."""

    @property
    def eof(self) -> bool:
        """The stream has ended."""

    @property
    def needs_input(self) -> bool:
        """Nothing more comes out without more going in."""

    @property
    def unused_data(self) -> bytes:
        """What was given beyond the end."""

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _ZlibInflater:
    def __init__(self, window_bits: int) -> None:
        self._stream = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        piece = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        # zlib may hold back output that fits nowhere, with no input left to show for it.
        self.needs_input = not self._stream.unconsumed_tail and len(piece) < max_length
        return piece


def _plain_deflate() -> Inflater:
    return _ZlibInflater(-zlib.MAX_WBITS)


def _plain_gzip() -> Inflater:
    return _ZlibInflater(16 + zlib.MAX_WBITS)


def _fast_deflate() -> Inflater:
    fast: Inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_DEFLATE)
    return fast


def _fast_gzip() -> Inflater:
    fast: Inflater = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
    return fast


#: For a stream without a header, as in a zip.
deflate_inflater: Callable[[], Inflater] = _fast_deflate if HAS_ISAL else _plain_deflate
#: For one member of a gzip file; its checksum is looked at.
gzip_inflater: Callable[[], Inflater] = _fast_gzip if HAS_ISAL else _plain_gzip
crc32: Callable[[bytes | memoryview, int], int] = isal_zlib.crc32 if HAS_ISAL else zlib.crc32
#: The CRC of two pieces, from that of each and the length of the second. None: there is no such
#: function, and whoever wants the CRC of a file reads it from one end to the other.
crc32_combine: Callable[[int, int, int], int] | None = (
    getattr(isal_zlib, "crc32_combine", None) if HAS_ISAL else None
)

#: What the two raise over damaged data.
ERRORS: tuple[type[Exception], ...] = (zlib.error,)
if HAS_ISAL:
    # The stubs call it an instance.
    ERRORS += (cast(type[Exception], igzip_lib.IsalError),)
