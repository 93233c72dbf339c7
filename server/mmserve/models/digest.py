"""The digest that an archive is known by: SHA-256 over the SHA-256 of each 8 MiB piece.

Not one SHA-256 over all: the pieces can be hashed side by side, and hashing would otherwise take
longer than copying the file.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading

from mmserve.models.packed import CHUNK_BYTES, Packed

PIECE_BYTES = 8 << 20


class Digest:
    """Of bytes that come one after the other."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._piece = hashlib.sha256()
        self._size = self._in_piece = 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            part = view[: PIECE_BYTES - self._in_piece]
            self._piece.update(part)
            self._size += len(part)
            self._in_piece += len(part)
            view = view[len(part) :]
            if self._in_piece == PIECE_BYTES:
                self._pieces.append(self._piece.digest())
                self._piece, self._in_piece = hashlib.sha256(), 0

    def text(self) -> str:
        """Hexadecimal; of the bytes so far."""
        last = [self._piece.digest()] if self._in_piece else []
        return _combined(self._pieces + last, self._size)


class FileDigest:
    """Of a file, by one thread that starts with the object and any that `help`."""

    def __init__(self, source: Packed) -> None:
        # A descriptor of its own: it may go on when whoever opened the file is done.
        self._source = source._replace(fd=os.dup(source.fd))
        self._count = -(-source.size // PIECE_BYTES)
        self._next = itertools.count()
        self._pieces: dict[int, bytes] = {}
        self._error: Exception | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self._help, name="hash", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return len(self._pieces) == self._count

    def text(self) -> str:
        """Hexadecimal; helps until all is hashed. Raises StorageFailed."""
        self._help()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return _combined([self._pieces[i] for i in range(self._count)], self._source.size)

    def status(self) -> os.stat_result:
        """Of the file, as it is now."""
        return os.fstat(self._source.fd)

    def close(self) -> None:
        """Gives up what is not hashed yet, and lets the file go."""
        self._is_stopped = True
        self._thread.join()
        os.close(self._source.fd)

    def _help(self) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        try:
            while not self._is_stopped and (index := next(self._next)) < self._count:
                self._pieces[index] = self._hashed(index, buffer)
        except Exception as error:
            self._error = error
            self._is_stopped = True

    def _hashed(self, index: int, buffer: memoryview) -> bytes:
        offset = index * PIECE_BYTES
        end = min(offset + PIECE_BYTES, self._source.size)
        digest = hashlib.sha256()
        while offset < end and not self._is_stopped:
            count = self._source.into(buffer[: end - offset], offset)
            if not count:
                break  # it has shrunk; whoever compares its times before and after will see
            digest.update(buffer[:count])
            offset += count
        return digest.digest()


def _combined(pieces: list[bytes], size: int) -> str:
    return hashlib.sha256(b"".join([b"%d:" % size, *pieces])).hexdigest()
