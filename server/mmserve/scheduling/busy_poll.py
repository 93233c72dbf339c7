"""Keeps the event loop awake for a moment after it has handed out quick work, or an answer."""

from __future__ import annotations

import asyncio
from time import monotonic

from mmserve.wire.polling import Polling


class BusyPoll:
    """A loop that would go to sleep looks at its sockets instead, again and again, for `limit_s`.

    One for all models: it is the loop that sleeps. Who sends quick work or answers it says so;
    whichever happens next ends the wait that was announced before.

    Args:
        limit_s: 0 to sleep always.

    Attributes:
        is_awake: the next turns of the loop are asked for.
    """

    __slots__ = ("_answers", "_limit_s", "_loop", "_requests", "_until", "_waiting", "is_awake")

    def __init__(self, limit_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._answers = Polling()  # of workers
        self._requests = Polling()  # of clients that have just had an answer
        self._waiting: Polling | None = None
        self._until = 0.0
        self.is_awake = False

    def sent(self, handler_s: float, now: float) -> None:
        """A worker has got a batch that takes about `handler_s`."""
        if handler_s < self._limit_s:
            self._expect(self._answers, now)

    def answered(self, handler_s: float, now: float) -> None:
        """A client has got what took its worker `handler_s`."""
        if handler_s < self._limit_s:
            self._expect(self._requests, now)

    def _expect(self, polling: Polling, now: float) -> None:
        if self._waiting is not None:
            self._waiting.ended(was_at_once=now < self._until)
        if not polling.is_worthwhile():
            self._waiting = None
            return
        self._waiting = polling
        self._until = now + self._limit_s
        if not self.is_awake:
            self.is_awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """In each turn of the loop, which does not sleep while this is due."""
        if self._waiting is not None:
            if monotonic() < self._until:
                self._loop.call_soon(self._look)
                return
            self._waiting.ended(was_at_once=False)
            self._waiting = None
        self.is_awake = False
