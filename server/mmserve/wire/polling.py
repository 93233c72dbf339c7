"""When to look again and again for what is about to come, rather than to sleep.

To wake a sleeping process takes longer than a quick handler does: some 25 µs where the other core
has to be roused first, and on a virtual machine both sides run on cold caches afterwards. So who
waits for something that usually comes at once stays awake for a moment. Where that moment mostly
passes in vain, it is given up for longer and longer. Quiet: no clock, no socket.
"""

from __future__ import annotations

#: Waits that are slept through at once, at most, before the next try.
MOST_SKIPPED = 255
#: How many more waits may have been in vain than not, before one is slept through: where both sides
#: stay awake, one that is late once makes the other late too.
MOST_CREDIT = 8
#: The same for a new try after some were slept through; its first wakes the other side.
RETRY_CREDIT = 3


class Polling:
    """Whether to stay awake for the next wait of one kind, by how the last ones went."""

    __slots__ = ("_credit", "_skipping", "_vain")

    def __init__(self) -> None:
        self._credit = MOST_CREDIT
        self._vain = 0  # waits that were skipped after the last one without credit
        self._skipping = 0  # waits that are still to be skipped

    def is_worthwhile(self) -> bool:
        """Asked once before each wait."""
        if not self._skipping:
            return True
        self._skipping -= 1
        if not self._skipping:
            self._credit = RETRY_CREDIT
        return False

    def ended(self, *, was_at_once: bool) -> None:
        """What was waited for came while we were awake, or did not.

        Each that did not takes from the credit that each that did gives. Without credit the next
        wait is slept through; where new tries are in vain too, the next 3, 7 and so on.
        """
        if was_at_once:
            self._credit = min(self._credit + 1, MOST_CREDIT)
            self._vain = 0
        elif self._credit:
            self._credit -= 1
        else:
            self._vain = self._skipping = min(2 * self._vain + 1, MOST_SKIPPED)
