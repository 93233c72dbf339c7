"""Lines on their way to one output."""

from __future__ import annotations

from collections.abc import Callable

#: What a str costs beyond its characters, in bytes.
OVERHEAD_BYTES = 56


class Backlog:
    """A bounded list: `put` by any thread, `take` by one.

    It has no lock. Every step on the list is atomic in CPython; the two byte counts have one
    writer each, the event loop's thread and the taker. A line of another thread that gets lost
    in the count makes the bound a little softer, until `take` next finds the list empty.

    Args:
        limit_bytes: lines above it are dropped and counted, so that a slow disk costs lines and
            not memory.
    """

    __slots__ = ("_limit", "_lines", "_put", "_taken", "dropped", "is_asleep", "wake")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._lines: list[str] = []
        self._put = self._taken = 0
        #: Lines that were dropped, ever.
        self.dropped = 0
        #: The taker waits for `wake`; it sets this before it looks a last time and waits.
        self.is_asleep = False
        self.wake: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._lines)

    def put(self, line: str) -> None:
        """Adds a line, which ends in a newline."""
        size = len(line) + OVERHEAD_BYTES
        if self._put - self._taken > self._limit:
            self.dropped += 1
            return
        self._put += size
        self._lines.append(line)
        if self.is_asleep:
            self.wake()

    def take(self, most: int) -> str:
        """The oldest lines, `most` of them at most, as one text."""
        lines = self._lines[:most]
        if not lines:
            self._taken = self._put
            return ""
        del self._lines[: len(lines)]
        text = "".join(lines)
        self._taken += len(text) + len(lines) * OVERHEAD_BYTES
        return text

    def shut(self) -> None:
        """From now on all is dropped, what waits included."""
        self._limit = -1
        self._put = self._taken + 1
        self._lines.clear()
