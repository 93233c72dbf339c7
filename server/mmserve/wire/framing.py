"""Frames: bytes ↔ messages. Knows no socket; `channel.py` does.

A frame is a prefix of 12 bytes (little-endian u32 size of the header, u64 size of the payload), the
header (one message of `messages.py` as MessagePack) and the payload (raw bytes).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")
Bytes = bytes | bytearray | memoryview

PREFIX = struct.Struct("<IQ")

#: Sizes above these are taken for garbage: nothing of ours comes near.
MAX_HEADER = 1 << 28
MAX_PAYLOAD = 1 << 36

_encode = msgspec.msgpack.Encoder().encode


class WireError(Exception):
    """The bytes are no frames of ours. The connection is of no more use."""


def encode(message: msgspec.Struct, parts: Sequence[Bytes] = ()) -> list[Bytes]:
    """The buffers of one frame, for `writev`; those in `parts` are not copied.

    Args:
        message: the header.
        parts: the payload, cut anywhere; views are of single bytes.
    """
    header = _encode(message)
    size = 0
    for part in parts:
        size += len(part)
    return [PREFIX.pack(len(header), size) + header, *parts]


def sizes(prefix: Bytes, at: int, max_header: int, max_payload: int) -> tuple[int, int]:
    """Size of header and payload, read from the prefix that begins at `at`.

    Raises:
        WireError: one of them is above its limit.
    """
    header, payload = PREFIX.unpack_from(prefix, at)
    if header > max_header or payload > max_payload:
        raise WireError(
            f"a frame says that it has a header of {header} and a payload of {payload} bytes; "
            f"at most {max_header} and {max_payload} are taken"
        )
    return header, payload


def decoder_of(kind: Any) -> Any:
    """`decode(header) -> message` for one type or a union. Raises WireError."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(header: Bytes) -> Any:
        try:
            return decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError) as broken:
            raise WireError(f"a frame's header is no message: {broken}") from None

    return checked


def cut(payload: Bytes, parts: Iterable[int]) -> list[memoryview]:
    """Views of the payload's parts, in order.

    Args:
        payload: of one frame.
        parts: bytes in each part.

    Raises:
        WireError: the sizes do not add up to the payload.
    """
    view = memoryview(payload)
    views, at = [], 0
    for size in parts:
        end = at + size
        if size < 0 or end > len(view):
            break
        views.append(view[at:end])
        at = end
    else:
        if at == len(view):
            return views
    raise WireError(f"a message cuts its payload of {len(view)} bytes into other sizes")


class Decoder(Generic[M]):
    """Frames out of a stream, right for any split of its bytes.

    Args:
        kind: message type, or a union of them.
        max_header: bytes of a header at most.
        max_payload: bytes of a payload at most.
    """

    def __init__(
        self, kind: Any, *, max_header: int = MAX_HEADER, max_payload: int = MAX_PAYLOAD
    ) -> None:
        self._decode = decoder_of(kind)
        self._max_header, self._max_payload = max_header, max_payload
        self._held = bytearray()  # the beginning of a frame that is not complete
        self._missing = 0  # bytes until it is, once its prefix is there

    def feed(self, data: bytes) -> list[tuple[M, memoryview]]:
        """The messages that `data` completes, each with its payload.

        Payloads are views of `data` or of a buffer of their own, good for as long as they are
        kept. Nothing of what a frame claims is believed before it has come: no room is made for
        bytes that are only announced.

        Raises:
            WireError: the stream is broken; this decoder is of no more use, and frames before the
                break that came with the same `data` are lost.
        """
        frames: list[tuple[M, memoryview]] = []
        at = 0
        if self._held:
            at = self._continue(data, frames)
        view, end = memoryview(data), len(data)
        while end - at >= PREFIX.size:
            header, payload = sizes(data, at, self._max_header, self._max_payload)
            body = at + PREFIX.size + header
            after = body + payload
            if after > end:
                self._missing = after - end
                break
            frames.append((self._decode(view[at + PREFIX.size : body]), view[body:after]))
            at = after
        if at < end:
            self._held += view[at:]
        return frames

    def _continue(self, data: bytes, frames: list[tuple[M, memoryview]]) -> int:
        """Adds to the frame that is held. Returns how much of `data` that took."""
        held, taken = self._held, 0
        if not self._missing:
            taken = min(PREFIX.size - len(held), len(data))
            held += data[:taken]
            if len(held) < PREFIX.size:
                return taken
            self._missing = sum(sizes(held, 0, self._max_header, self._max_payload))
        view = memoryview(data)[taken : taken + self._missing]
        held += view
        taken += len(view)
        self._missing -= len(view)
        if not self._missing:
            whole = memoryview(held)
            body = PREFIX.size + PREFIX.unpack_from(held)[0]
            frames.append((self._decode(whole[PREFIX.size : body]), whole[body:]))
            self._held = bytearray()
        return taken
