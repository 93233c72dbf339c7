from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from mmserve.errors import StorageFailed
from mmserve.models.digest import digest_of
from mmserve.models.packed import CHUNK_BYTES, Packed


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 17])
def test_a_file_has_the_digest_of_its_bytes(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert digest_of(Packed(file.fileno(), size)) == hashlib.sha256(data).hexdigest()


def test_whoever_asked_may_give_up(tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def check() -> None:
        raise EnoughError

    (tmp_path / "file").write_bytes(b"x")
    with (tmp_path / "file").open("rb") as file, pytest.raises(EnoughError):
        digest_of(Packed(file.fileno(), 1), check)


def test_a_file_that_cannot_be_read_is_a_storage_failure(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)  # a directory
    try:
        with pytest.raises(StorageFailed, match=r"read archive\.mar: Is a directory \(EISDIR"):
            digest_of(Packed(fd, 100, "archive.mar"))
    finally:
        os.close(fd)
