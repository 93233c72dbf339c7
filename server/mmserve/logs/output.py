"""What a worker prints, as lines."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from mmserve.logs.escape import escaped

#: Bytes of a line; the rest of it is dropped.
LINE_LIMIT = 8 * 1024
#: What one stream may say for long, and at once. A handler that prints its whole input, or a
#: progress bar, stays below; megabytes of `x` do not, and cost no more than counting them.
LINES_PER_S, BURST_LINES = 1000, 4000
BYTES_PER_S, BURST_BYTES = 256 * 1024, 1024 * 1024
#: Seconds of silence once that is used up.
MUTE_S = 1.0

_STEP_BYTES = 8 * 1024
_METRIC = "[METRICS]"


def worker_name(model: str, number: int) -> str:
    """`W-{model, 25 characters}-{n}`: a worker in logs, as Multi Model Server names its thread."""
    return f"W-{escaped(model[:25])}-{number}"


class OutputLine(NamedTuple):
    """Attributes:
    text: without its end; may hold control characters.
    is_metric: it is a finished metric line.
    """

    text: str
    is_metric: bool = False


class OutputReader:
    """Cuts a stream of bytes into lines. No descriptor and no clock: time comes in as `now`.

    A line ends with `\\n`, `\\r\\n` or `\\r` (a progress bar's), as in Multi Model Server.
    Bytes that are not UTF-8 are shown as `\\xff`. As long as the budget lasts, the lines are the
    same however the bytes are split; beyond it, lines are counted, dropped, and told of in one.

    Args:
        metric: makes a finished metric line of one that begins with `[METRICS]`, or None of one
            that is none and stays text (`metrics.lines.from_worker`). Without it all is text.
    """

    def __init__(
        self,
        metric: Callable[[str], str | None] | None = None,
        *,
        lines_per_s: float = LINES_PER_S,
        bytes_per_s: float = BYTES_PER_S,
        burst_lines: int = BURST_LINES,
        burst_bytes: int = BURST_BYTES,
        line_limit: int = LINE_LIMIT,
    ) -> None:
        self._metric = metric
        self._lines_per_s, self._bytes_per_s = lines_per_s, bytes_per_s
        self._burst_lines, self._burst_bytes = burst_lines, burst_bytes
        self._lines_left, self._bytes_left = float(burst_lines), float(burst_bytes)
        self._line_limit = line_limit
        self._refilled_at = -math.inf
        self._mute_until = -math.inf
        self._dropped_lines = self._dropped_bytes = 0
        self._partial = b""  # of a line whose end has not come
        self._is_skipping = False  # the rest of a line that was cut
        self._after_cr = False  # a \n now belongs to the \r before it

    def feed(self, data: bytes, now: float) -> list[OutputLine]:
        """The lines that `data` completes.

        Args:
            now: seconds of a clock that never goes back.
        """
        if now < self._mute_until:
            self._drop(data)
            return []
        lines = self.tick(now)
        self._refill(now)
        for start in range(0, len(data), _STEP_BYTES):
            if self._lines_left < 1 or self._bytes_left <= 0:
                self._mute_until = now + MUTE_S
                self._drop(data[start:])
                break
            self._split(data[start : start + _STEP_BYTES], lines)
        return lines

    def next_deadline(self) -> float:
        """When `tick` has something to tell; infinity while nothing was dropped."""
        return self._mute_until if self._dropped_lines else math.inf

    def tick(self, now: float) -> list[OutputLine]:
        """The notice about dropped lines, once the pause is over; else []."""
        if now < self._mute_until or not self._dropped_lines:
            return []
        return [self._notice()]

    def end(self) -> list[OutputLine]:
        """What is left at the end of the stream."""
        lines = []
        if self._dropped_lines:
            lines.append(self._notice())
        if self._partial:
            lines.append(self._line(self._partial))
            self._partial = b""
        return lines

    def _refill(self, now: float) -> None:
        gone_s = now - self._refilled_at
        self._refilled_at = now
        self._lines_left = min(self._burst_lines, self._lines_left + gone_s * self._lines_per_s)
        self._bytes_left = min(self._burst_bytes, self._bytes_left + gone_s * self._bytes_per_s)

    def _split(self, data: bytes, lines: list[OutputLine]) -> None:
        if self._after_cr and data.startswith(b"\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        for piece in data.splitlines(keepends=True):
            body = piece.rstrip(b"\r\n")
            is_ended = len(body) < len(piece)
            if self._is_skipping:
                self._is_skipping = not is_ended
                continue
            body = self._partial + body
            is_cut = len(body) > self._line_limit
            if not is_ended and not is_cut:
                self._partial = body
                continue
            self._partial = b""
            self._is_skipping = is_cut and not is_ended
            if self._lines_left < 1:
                self._count(1, len(body))
                continue
            self._lines_left -= 1
            self._bytes_left -= len(body) + 1
            lines.append(self._cut(body) if is_cut else self._line(body))

    def _line(self, body: bytes) -> OutputLine:
        text = body.decode("utf-8", "backslashreplace")
        if self._metric is not None and text.startswith(_METRIC):
            metric = self._metric(text)
            if metric is not None:
                return OutputLine(metric, True)
        return OutputLine(text)

    def _cut(self, body: bytes) -> OutputLine:
        end = self._line_limit
        while end > self._line_limit - 4 and body[end] & 0xC0 == 0x80:
            end -= 1  # not in the middle of a character
        text = body[:end].decode("utf-8", "backslashreplace")
        return OutputLine(f"{text} … [cut after {self._line_limit} bytes]")

    def _drop(self, data: bytes) -> None:
        """Follows the lines without making any."""
        last = max(data.rfind(b"\n"), data.rfind(b"\r"))
        ends = data.count(b"\n")
        if b"\r" in data:
            ends += data.count(b"\r") - data.count(b"\r\n")
        if self._after_cr and data.startswith(b"\n"):
            ends -= 1
        if data:
            self._after_cr = data.endswith(b"\r")
        tail = data[last + 1 :]
        if ends and self._is_skipping:
            # The end of a line that was cut, and told of, before.
            self._is_skipping = False
            ends -= 1
        if ends:
            self._count(ends, len(self._partial) + last + 1)
            self._partial = b""
        if self._is_skipping:
            return
        self._partial += tail
        if len(self._partial) > self._line_limit:
            self._count(1, len(self._partial))
            self._partial = b""
            self._is_skipping = True

    def _count(self, lines: int, size_bytes: int) -> None:
        self._dropped_lines += lines
        self._dropped_bytes += size_bytes

    def _notice(self) -> OutputLine:
        lines, size_mb = self._dropped_lines, self._dropped_bytes / 1e6
        self._dropped_lines = self._dropped_bytes = 0
        return OutputLine(
            f"… {lines} lines ({size_mb:.1f} MB) of output dropped: a worker may print "
            f"{self._lines_per_s:g} lines or {self._bytes_per_s / 1024:g} KiB a second"
        )
