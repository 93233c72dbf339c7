"""Ends a download from outside: when its time is up, or when nobody waits for it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Self


class Watch:
    """Lets another thread end a download, and ends it when its time is up."""

    def __init__(self, total_s: float) -> None:
        self._reason = ""
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._total_s = total_s
        self._timer = threading.Timer(total_s, self.stop, [f"it took more than {total_s:g} s"])
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def stop(self, reason: str) -> None:
        """Whoever reads from the socket finds it closed."""
        with self._lock:
            self._reason = self._reason or reason
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def reason(self) -> str:
        """Why it was stopped; "" while it was not."""
        return self._reason

    @contextlib.contextmanager
    def over(self, sock: socket.socket | None) -> Iterator[None]:
        with self._lock:
            self._socket = sock
        try:
            yield
        finally:
            with self._lock:
                self._socket = None
