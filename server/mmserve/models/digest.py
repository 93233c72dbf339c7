"""The SHA-256 of an archive, by which it is known whichever file or address it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from mmserve.models.packed import CHUNK_BYTES, Packed


def digest_of(source: Packed, check: Callable[[], None] = lambda: None) -> str:
    """Reads a whole archive. Hexadecimal.

    Args:
        check: called between pieces; raises to give up.

    Raises StorageFailed.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    offset = 0
    while count := source.into(buffer, offset):
        digest.update(buffer[:count])
        offset += count
        check()
    return digest.hexdigest()
