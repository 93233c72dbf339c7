"""`inflate.py`."""

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest, BodyTooLarge
from mmserve.frontend.inflate import Inflater


def inflate(pieces: list[bytes], limit: int = 1_000_000) -> bytes:
    inflater = Inflater(limit)
    body = b"".join([inflater.feed(piece) for piece in pieces])
    inflater.finish()
    return body


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3), st.integers(1, 50))
def test_any_split_of_any_members_gives_the_bytes(members: list[bytes], step: int) -> None:
    packed = b"".join(gzip.compress(member, mtime=0) for member in members)
    pieces = [packed[at : at + step] for at in range(0, len(packed), step)]
    assert inflate(pieces) == b"".join(members) == inflate([packed])


def test_the_limit_is_exact() -> None:
    packed = gzip.compress(b"x" * 1000)
    assert len(inflate([packed], limit=1000)) == 1000
    with pytest.raises(BodyTooLarge, match="999 bytes"):
        inflate([packed], limit=999)


def test_a_bomb_costs_no_more_than_the_limit() -> None:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    bomb = b"".join([packer.compress(bytes(1 << 20)) for _ in range(100)]) + packer.flush()
    inflater = Inflater(1 << 20)
    inflater.feed(bomb[:10])
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            inflater.feed(bomb[10:])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    "data",
    [
        b"plain text",
        zlib.compress(b"zlib is not gzip"),
        gzip.compress(b"x" * 99)[:-1],
        gzip.compress(b"x" * 99)[:5],
        gzip.compress(b"x" * 99)[:-8] + b"wrongsum",
        gzip.compress(b"x") + b"rubbish behind it",
    ],
)
def test_what_is_no_gzip_is_the_clients_mistake(data: bytes) -> None:
    for pieces in ([data], [bytes([byte]) for byte in data]):
        with pytest.raises(BadRequest, match="not the gzip"):
            inflate(pieces)
