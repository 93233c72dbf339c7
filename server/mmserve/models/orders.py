"""What the front and the fetcher say to each other: MessagePack, each message behind its length."""

from __future__ import annotations

import struct

import msgspec

from mmserve.errors import ServeError, StorageFailed
from mmserve.models.limits import DownloadLimits, Limits, Rules
from mmserve.models.manifest import Manifest, Overrides, Resolved

# front → fetcher


class Configure(msgspec.Struct, tag="configure", array_like=True):
    """The first message. Not answered.

    Attributes:
        root, home: folders of the cache; "" where there is none, and `trouble` says why.
        libraries: names that sources are searched for.
        tokens: those in use; others of this server are left from a fetcher that was killed.
    """

    root: str
    home: str
    trouble: str
    rules: Rules
    limits: Limits
    download_limits: DownloadLimits
    libraries: list[str]
    tokens: list[str]


class Fetch(msgspec.Struct, tag="fetch", array_like=True):
    """Brings a model. Answered by Brought."""

    id: int
    url: str
    store: str | None
    overrides: Overrides


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Nobody waits for this one any more. It is answered all the same."""

    id: int


class Release(msgspec.Struct, tag="release", array_like=True):
    """A token of Brought is not needed any more. Answered by Done."""

    id: int
    token: str
    keep: bool


class ListStartup(msgspec.Struct, tag="startup", array_like=True):
    """Which models to load at start. Answered by Listed."""

    id: int
    load_models: str
    store: str | None


class Sweep(msgspec.Struct, tag="sweep", array_like=True):
    """Folders that dead servers have left. Answered by Done."""

    id: int
    folders: list[str]


# fetcher → front


class Brought(msgspec.Struct, tag="brought", array_like=True):
    """The model is there, and stays until its token is released; "" needs no release."""

    id: int
    directory: str
    resolved: Resolved
    manifest: Manifest
    digest: str | None
    token: str
    size: int | None
    top_names: list[str]
    code_names: list[str]
    names_libraries: bool


class Listed(msgspec.Struct, tag="listed", array_like=True):
    id: int
    models: list[tuple[str | None, str]]
    warnings: list[str]


class Done(msgspec.Struct, tag="done", array_like=True):
    id: int


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """In place of any answer: a `ServeError`, by the name of its class."""

    id: int
    kind: str
    message: str


Order = Configure | Fetch | Cancel | Release | ListStartup | Sweep
Answer = Brought | Listed | Done | Failed

_LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 16 << 20  # a manifest may have 1 MiB; nothing else is large

encode = msgspec.msgpack.Encoder().encode


def frame(message: Order | Answer) -> bytes:
    """A message as it is sent."""
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a stream into messages, however it was split. Quiet."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ValueError for a message that is too long."""
        self._data += data
        frames = []
        while len(self._data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data)
            if size > MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {size} bytes")
            end = _LENGTH.size + size
            if len(self._data) < end:
                break
            frames.append(bytes(self._data[_LENGTH.size : end]))
            del self._data[:end]
        return frames


def failure(failed: Failed) -> ServeError:
    """The error that the fetcher met, as an exception of the same class."""
    kinds = {kind.__name__: kind for kind in _subclasses(ServeError)}
    kind = kinds.get(failed.kind, StorageFailed)
    # Not through `__init__`: some make their message themselves, and this one is made already.
    error = kind.__new__(kind, failed.message)
    assert isinstance(error, ServeError)
    return error


def _subclasses(kind: type[ServeError]) -> list[type[ServeError]]:
    found = []
    for child in kind.__subclasses__():
        found += [child, *_subclasses(child)]
    return found
