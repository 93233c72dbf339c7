"""The digest that an archive is known by: SHA-256 over the SHA-256 of each 8 MiB piece.

Not one SHA-256 over all: the pieces can be hashed side by side, and hashing would otherwise take
longer than copying the file.
"""

from __future__ import annotations

import hashlib
import itertools
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
    """Of a file, by as many threads as call `help`. The first starts with the object."""

    def __init__(self, source: Packed) -> None:
        self._source = source
        self._count = -(-source.size // PIECE_BYTES)
        self._next = itertools.count()
        self._pieces: dict[int, bytes] = {}
        self._error: Exception | None = None
        self._is_stopped = False
        self._thread = threading.Thread(target=self.help, name="hash", daemon=True)
        self._thread.start()

    def help(self) -> None:
        """Hashes pieces until none is left."""
        buffer = memoryview(bytearray(CHUNK_BYTES))
        try:
            while not self._is_stopped and (index := next(self._next)) < self._count:
                self._pieces[index] = self._hashed(index, buffer)
        except Exception as error:
            self._error = error
            self._is_stopped = True

    def text(self) -> str:
        """Hexadecimal, once all is hashed. Raises StorageFailed."""
        self.help()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return _combined([self._pieces[i] for i in range(self._count)], self._source.size)

    def stop(self) -> None:
        """Returns once nobody reads the file any more."""
        self._is_stopped = True
        self._thread.join()

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
