"""What the front and the zygote say to each other, and the zygote's libraries and templates.

A control link is a stream socket pair. Each message is a little-endian u32 size and a MessagePack
body; descriptors travel with its first byte.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from mmserve.platform import receive_with_fds, send_with_fds

_SIZE = struct.Struct("<I")

#: Names and values of variables: bytes, which need not be UTF-8.
Environ = dict[bytes, bytes]


def environ_of(variables: Mapping[str, str]) -> Environ:
    """From the form of `os.environ`."""
    return {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}


# front → zygote


class Start(msgspec.Struct, tag="start", array_like=True):
    """Start a process. Descriptors: wire, stdout, stderr, and control for all but workers.

    Attributes:
        ticket: repeated in the answer, Started or StartFailed.
        kind: "fork" (a worker), "exec" (a worker in a fresh interpreter), "library" (imports
            `imports`, then forks workers on Spawn) or "template" (loads a model, then forks).
        environ: the whole environment of the process.
        imports: modules, for "library".
        interpreter: the words that start one which finds mmserve, for "exec".
    """

    ticket: int
    kind: str
    environ: Environ
    imports: list[str] = []
    interpreter: list[str] = []


class Signal(msgspec.Struct, tag="signal", array_like=True):
    """Signal the process group that a child leads. Ignored when the child is reaped already."""

    pid: int
    number: int


# front → library or template


class Spawn(msgspec.Struct, tag="spawn", array_like=True):
    """Fork a worker ("fork") or, from the library, a template ("template").

    Descriptors: wire, stdout, stderr, and control for a template. Answered by Started or
    StartFailed.
    """

    ticket: int
    kind: str
    environ: Environ


# zygote, library or template → front


class Started(msgspec.Struct, tag="started", array_like=True):
    ticket: int
    pid: int


class StartFailed(msgspec.Struct, tag="start_failed", array_like=True):
    ticket: int
    cause: str
    out_of_memory: bool


class Exited(msgspec.Struct, tag="exited", array_like=True):
    """A child has ended and is reaped; its process group was killed before.

    Attributes:
        code: exit status, or minus the number of the signal.
        oom_kills: how often the kernel's out-of-memory killer struck in our cgroup so far.
    """

    pid: int
    code: int
    oom_kills: int = 0


class Import(msgspec.Struct, array_like=True):
    """What one preloaded import cost. `error` names why it was left out."""

    module: str
    seconds: float
    rss_bytes: int
    error: str = ""


class Up(msgspec.Struct, tag="up", array_like=True):
    """The zygote's first word.

    Attributes:
        modules: as in `LibraryReady`, of what the zygote holds.
    """

    modules: dict[str, str]


class LibraryReady(msgspec.Struct, tag="library_ready", array_like=True):
    """The library process can fork.

    Attributes:
        imports: in the order asked for.
        modules: top-level name → file (or "" for built-in ones) of what is imported.
    """

    imports: list[Import]
    modules: dict[str, str]


class LibraryUnfit(msgspec.Struct, tag="library_unfit", array_like=True):
    """An import started a thread: a fork from here could hang. The process ends after this."""

    module: str
    threads: int


ToZygote = Start | Signal
ToLibrary = Spawn
FromZygote = Up | Started | StartFailed | Exited | LibraryReady | LibraryUnfit


def pack(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _SIZE.pack(len(body)) + body


class Unpacker:
    """`feed(data, fds)` → messages with their descriptors, right for any split of the bytes.

    All messages of one direction carry a known number of descriptors: `fds_of(message)`.

    Attributes:
        fds: that came, with messages that are not complete.
    """

    def __init__(self, kind: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._data = bytearray()
        self.fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> list[tuple[msgspec.Struct, list[int]]]:
        self._data += data
        self.fds += fds
        found = []
        while len(self._data) >= 4:
            (size,) = _SIZE.unpack_from(self._data)
            if len(self._data) < 4 + size:
                break
            message = self._decoder.decode(bytes(self._data[4 : 4 + size]))
            del self._data[: 4 + size]
            count = fds_of(message)
            found.append((message, self.fds[:count]))
            del self.fds[:count]
        return found


def fds_of(message: msgspec.Struct) -> int:
    """Descriptors that travel with a message."""
    if isinstance(message, Start | Spawn):
        return 3 if message.kind in ("fork", "exec") else 4
    return 0


class BlockingLink:
    """One end of a control link, for the processes that wait in `poll` and fork."""

    def __init__(self, sock: socket.socket, kind: object) -> None:
        self.socket = sock
        self._unpacker = Unpacker(kind)
        self._heard: deque[tuple[msgspec.Struct, list[int]]] = deque()

    def receive(self) -> bool:
        """Waits for one read's worth of what comes. False at end-of-file."""
        try:
            data, fds = receive_with_fds(self.socket, 1 << 16)
        except ConnectionError:
            return False
        self._heard += self._unpacker.feed(data, fds)
        return bool(data)

    def messages(self) -> Iterator[tuple[msgspec.Struct, list[int]]]:
        """What was received and is complete; each with descriptors that are the caller's now."""
        while self._heard:
            yield self._heard.popleft()

    def let_go(self) -> None:
        """In a fork: closes the socket, and what came with orders that are not for it.

        A worker that held another one's wire would hide its end from the front.
        """
        self.socket.close()
        for fd in [*self._unpacker.fds, *(fd for _, fds in self._heard for fd in fds)]:
            os.close(fd)

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Says it, unless the other end is gone: `receive` will tell."""
        data = memoryview(pack(message))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sent = send_with_fds(self.socket, data, fds)  # type: ignore[arg-type]
            if sent < len(data):
                self.socket.sendall(data[sent:])
