from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import StorageFailed
from mmserve.models.digest import PIECE_BYTES, Digest, FileDigest
from mmserve.models.packed import Packed


def in_one(data: bytes) -> str:
    digest = Digest()
    digest.update(data)
    return digest.text()


@given(st.binary(max_size=500), st.lists(st.integers(0, 100)))
def test_the_digest_does_not_depend_on_how_the_bytes_came(data: bytes, cuts: list[int]) -> None:
    digest = Digest()
    rest = memoryview(data)
    for cut in cuts:
        digest.update(rest[:cut])
        rest = rest[cut:]
    digest.update(rest)
    assert digest.text() == in_one(data)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 17])
def test_a_file_has_the_digest_of_its_bytes(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    path = tmp_path / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    hashing = FileDigest(Packed(fd, size))
    os.close(fd)  # it has its own
    try:
        assert hashing.text() == in_one(data)
        assert hashing.is_done
    finally:
        hashing.close()


def test_bytes_in_another_order_have_another_digest() -> None:
    first, second = bytes(PIECE_BYTES), b"\1" + bytes(PIECE_BYTES - 1)
    assert in_one(first + second) != in_one(second + first)
    assert in_one(b"") != in_one(b"\0")


def test_a_file_that_cannot_be_read_is_a_storage_failure(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)  # a directory
    hashing = FileDigest(Packed(fd, 100, "archive.mar"))
    os.close(fd)
    try:
        with pytest.raises(StorageFailed, match=r"read archive\.mar: Is a directory \(EISDIR"):
            hashing.text()
    finally:
        hashing.close()
