"""Request ids: random UUIDs (version 4), made by the hundred."""

from __future__ import annotations

import os

_BATCH = 256
_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}

_ready: list[str] = []
# A fork that kept the parent's stock would hand out the parent's ids.
os.register_at_fork(after_in_child=_ready.clear)


def fresh_id() -> str:
    """A UUID that no other request has, e.g. "0b6ba6f8-5e1c-4c0a-9d8a-2f5a3c1de7b4"."""
    if not _ready:
        _refill()
    return _ready.pop()


def _refill() -> None:
    digits = os.urandom(16 * _BATCH).hex()
    for at in range(0, len(digits), 32):
        one = digits[at : at + 32]
        _ready.append(
            f"{one[:8]}-{one[8:12]}-4{one[13:16]}-{_VARIANT[one[16]]}{one[17:20]}-{one[20:]}"
        )
