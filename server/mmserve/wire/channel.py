"""A worker's end of its socket pair: whole frames, waited for."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import msgspec

from mmserve.wire.framing import (
    MAX_HEADER,
    MAX_PAYLOAD,
    PREFIX,
    Bytes,
    decoder_of,
    encode,
    sizes,
)
from mmserve.wire.messages import ToWorker
from mmserve.wire.polling import Polling

#: Frames up to this size are read together with whatever else has come; larger ones take a buffer
#: of their own, which a handler gets as it is.
ROOM = 64 * 1024

#: Below this, joining the buffers of a frame costs less than handing them to the kernel one by one.
_JOIN_BELOW = 16 * 1024
_MOST_BUFFERS = 1024  # IOV_MAX on Linux
_AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)
_QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)  # an error, not SIGPIPE, when the front is gone


_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: None)


class Channel:
    """Sends and receives frames over a blocking stream socket, which it owns.

    Several frames may wait in the socket: the front sends the next batch before it has the reply
    to this one.

    Attributes:
        awake_s: how long to look for the next frame before sleeping until it comes; 0 sleeps.
    """

    def __init__(self, sock: socket.socket, kind: Any = ToWorker) -> None:
        sock.setblocking(True)
        sock.set_inheritable(False)
        self.socket = sock
        self.awake_s = 0.0
        self._polling = Polling()
        self._decode = decoder_of(kind)
        self._room = bytearray(ROOM)
        self._view = memoryview(self._room)
        self._start = self._end = 0  # what is read and not yet handed out

    def recv(self) -> tuple[Any, bytearray | memoryview] | None:
        """The next message and its payload; None when the peer is gone.

        A payload is good until the next call, unless it is a bytearray: that belongs to the
        caller.

        Raises:
            WireError: the stream is broken.
            OSError: the descriptor is no socket any more.
        """
        while True:
            held = self._end - self._start
            if held >= PREFIX.size:
                header, payload = sizes(self._room, self._start, MAX_HEADER, MAX_PAYLOAD)
                frame = PREFIX.size + header + payload
                if frame <= held:
                    return self._take(header, frame)
                if frame > ROOM:
                    return self._read_large(header, payload)
            if self._start:  # the rest of a frame must fit behind its beginning
                self._view[:held] = self._view[self._start : self._end]
                self._start, self._end = 0, held
            if not (count := self._read(self._view[self._end :])):
                return None
            self._end += count

    def _take(self, header: int, frame: int) -> tuple[Any, memoryview]:
        begin, end = self._start + PREFIX.size, self._start + frame
        self._start = end
        if end == self._end:
            self._start = self._end = 0
        body = begin + header
        return self._decode(self._view[begin:body]), self._view[body:end]

    def _read_large(self, header: int, payload: int) -> tuple[Any, bytearray] | None:
        """The frame that has begun, into buffers of its own; no byte beyond its end is read."""
        self._start += PREFIX.size
        parts = bytearray(header), bytearray(payload)
        for part in parts:
            view = memoryview(part)
            at = min(self._end - self._start, len(part))
            view[:at] = self._view[self._start : self._start + at]
            self._start += at
            while at < len(part):
                if not (count := self._read(view[at:])):
                    return None
                at += count
            view.release()
        self._start = self._end = 0
        return self._decode(parts[0]), parts[1]

    def _read(self, into: memoryview) -> int:
        try:
            if self.awake_s and self._polling.is_worthwhile():
                until = monotonic() + self.awake_s
                count = self._look(into, until)
                # Late though it came: others want the processor, and a sleeper gets it back sooner.
                self._polling.ended(was_at_once=monotonic() < until)
                if count is not None:
                    return count
            return self.socket.recv_into(into)
        except ConnectionError:
            return 0

    def _look(self, into: memoryview, until: float) -> int | None:
        """Stays awake, and lets others have the processor. None: nothing came."""
        while True:
            try:
                return self.socket.recv_into(into, 0, _AT_ONCE)
            except BlockingIOError:
                if monotonic() >= until:
                    return None
            _yield()

    def send(self, message: msgspec.Struct, parts: Sequence[Bytes] = ()) -> None:
        """Returns when the kernel has all of it.

        Raises:
            ConnectionError: the peer is gone.
            OSError: the descriptor is no socket any more.
        """
        buffers = encode(message, parts)
        if len(buffers) == 1 or sum(map(len, buffers)) < _JOIN_BELOW:
            self.socket.sendall(b"".join(buffers), _QUIETLY)
            return
        first = 0
        while first < len(buffers):
            sent = self.socket.sendmsg(buffers[first : first + _MOST_BUFFERS], (), _QUIETLY)
            while first < len(buffers) and sent >= (size := len(buffers[first])):
                sent -= size
                first += 1
            if sent:
                buffers[first] = memoryview(buffers[first])[sent:]

    def close_in_children(self) -> None:
        """From now on a fork of this process lets go of the channel.

        Handlers fork (`multiprocessing` does). A child that held the channel would hide our end
        from the front, and one that returned from the handler would answer in our place.
        """
        ours = weakref.ref(self)

        def let_go() -> None:
            channel = ours()
            if channel is not None:
                channel.socket.close()

        os.register_at_fork(after_in_child=let_go)
