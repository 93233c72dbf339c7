"""How a process ended, and whether the kernel ended it for memory. Quiet: no process, no clock."""

from __future__ import annotations

import contextlib
import signal

import msgspec

#: Seconds within which the death that the out-of-memory killer caused is reported.
STRIKE_FRESH_S = 5.0


class Exit(msgspec.Struct, frozen=True):
    """How a process ended.

    Attributes:
        code: exit status, or minus the number of the signal; None where nobody could see it.
        was_out_of_memory: the kernel killed it for memory.
    """

    code: int | None
    was_out_of_memory: bool = False

    def __str__(self) -> str:
        if self.code is None:
            return "How it ended is not known."
        if self.code >= 0:
            return f"It exited with status {self.code}."
        words = f"It was killed by signal {-self.code}"
        with contextlib.suppress(ValueError):
            words += f" ({signal.Signals(-self.code).name})"
        if self.was_out_of_memory:
            return words + ": the kernel ran out of memory."
        if self.code == -signal.SIGKILL:
            return words + ", probably out of memory."
        return words + "."


class OomKills:
    """Tells which of several deaths by signal 9 were the out-of-memory killer's.

    The kernel only counts its strikes. Each explains one death, if that is reported soon after;
    it may have hit a process that is none of ours.

    Args:
        count: of the kernel's counter now.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._fresh: list[float] = []  # when we saw the counter rise, once for each strike

    def look(self, count: int, now: float) -> None:
        """The counter, as read after a death."""
        self._fresh = [at for at in self._fresh if now - at < STRIKE_FRESH_S]
        self._fresh += [now] * (count - self._count)
        self._count = max(count, self._count)

    def explain(self) -> bool:
        """Whether a strike accounts for a death by signal 9. It accounts for no other then."""
        if not self._fresh:
            return False
        self._fresh.pop(0)
        return True
