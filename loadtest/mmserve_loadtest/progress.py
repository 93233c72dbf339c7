"""What the person at the terminal sees while a measurement runs."""

from __future__ import annotations

import sys
from typing import TextIO


class Ticker:
    """One line on a terminal, written over and over; on anything else, one line per step."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_live = self._stream.isatty()
        self._step = ""

    def step(self, text: str) -> None:
        """A new step begins."""
        self._step = text
        if self._is_live:
            self._show(text)
        else:
            print(text, file=self._stream, flush=True)

    def tell(self, elapsed_s: float, replies: int | None) -> None:
        """How far the step is; a `load.Progress`."""
        if self._is_live:
            count = "" if replies is None else f", {replies:,} replies"
            self._show(f"{self._step}  {max(elapsed_s, 0):.0f} s{count}")

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._is_live:
            self._stream.write("\r\x1b[K")
        print(text, file=self._stream, flush=True)

    def done(self) -> None:
        if self._is_live:
            self._show("")

    def _show(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()
