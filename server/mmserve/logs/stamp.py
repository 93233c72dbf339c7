"""The time at the head of a line."""

from __future__ import annotations

import time


class Stamp:
    """Turns epoch seconds into text.

    `of(now)` is `yyyy-MM-ddTHH:mm:ss,SSS` in local time, as Multi Model Server writes it, or
    with `utc` an ISO 8601 time that ends in Z, for JSON. The text of a millisecond is kept, and
    that of a second: under load many lines share the one, and all lines the other.
    """

    __slots__ = ("_at", "_second", "_utc")

    def __init__(self, *, utc: bool = False) -> None:
        self._utc = utc
        # Tuples, replaced as a whole: threads share a stamp.
        self._at: tuple[float, float, str] = (0.0, 0.0, "")
        self._second: tuple[int, str] = (-1, "")

    def of(self, now: float) -> str:
        start, end, text = self._at
        return text if start <= now < end else self._renew(now)

    def _renew(self, now: float) -> str:
        second, text = self._second
        if second != now // 1:
            second = int(now // 1)
            if self._utc:
                text = time.strftime("%Y-%m-%dT%H:%M:%S.", time.gmtime(second))
            else:
                text = time.strftime("%Y-%m-%dT%H:%M:%S,", time.localtime(second))
            self._second = second, text
        ms = int((now - second) * 1000)
        text = f"{text}{ms:03d}{'Z' if self._utc else ''}"
        self._at = now, second + (ms + 1) / 1000, text
        return text
