"""Bytes as a stream of frames: messages, or a wire error, and the same for every split."""

from __future__ import annotations

import contextlib
from typing import Any

from mmserve.wire.framing import Decoder, WireError, cut, encode
from mmserve.wire.messages import Replies, ToFront, ToWorker


def one_input(data: bytes) -> None:
    """Raises what a worker that went mad should never cause in the front.

    The first byte chooses the direction, the second into how many bytes the rest is split.
    """
    if len(data) < 2:
        return
    kind, step, stream = (ToWorker, ToFront)[data[0] % 2], 1 + data[1] % 64, data[2:]
    whole = _frames(kind, [stream])
    pieces = _frames(kind, [stream[at : at + step] for at in range(0, len(stream), step)])
    if whole is None or pieces is None:
        assert whole is pieces
        return
    assert whole == pieces or "nan" in repr(whole)  # NaN is no equal of its own
    for message, payload in whole:
        again = _frames(kind, [b"".join(map(bytes, encode(message, [payload])))])
        assert again == [(message, payload)] or "nan" in repr(message)
        if isinstance(message, Replies):
            with contextlib.suppress(WireError):
                cut(payload, [outcome.size for outcome in message.outcomes])


def _frames(kind: object, chunks: list[bytes]) -> list[tuple[Any, bytes]] | None:
    """Messages and payloads; None where the stream is broken."""
    decoder: Decoder[Any] = Decoder(kind)
    frames: list[tuple[Any, bytes]] = []
    try:
        for chunk in chunks:
            frames += [(message, bytes(payload)) for message, payload in decoder.feed(chunk)]
    except WireError:
        return None
    return frames
