"""Counters of requests, one line per reply as Multi Model Server writes them."""

from __future__ import annotations

from mmserve.metrics.lines import HOST, metric_line


class RequestCounters:
    """`Requests2XX`, `Requests4XX`, `Requests5XX`, each with value 1.

    Whatever is neither 2xx nor 4xx counts as 5XX, as in Multi Model Server (`NettyUtils`, 1.1.11);
    unlike there, the timestamp is a time. A line holds for a second, so it is made once a second.
    """

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._second = -1
        self._made: dict[int, str] = {}

    def line(self, status: int, now: float) -> str:
        """The metric line of one reply; `now` in epoch seconds."""
        if not 0 <= now - self._second < 1:
            self._made = {}
            self._second = int(now)
        made = self._made.get(status)
        if made is None:
            name = f"Requests{status // 100 if status // 100 in (2, 4) else 5}XX"
            made = metric_line(
                name, 1, "Count", HOST, hostname=self._hostname, timestamp=self._second
            )
            self._made[status] = made
        return made
