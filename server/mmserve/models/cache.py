"""Unpacked archives, shared by all that use them.

    ROOT/entries/NUMBER-SIZE/tree/…      an unpacked archive of that size; beside it `about`, its
                                         files, and `keys`, which of `seen` lead here
    ROOT/seen/KEY                        which entry an archive became; see `file_key`, `digest_key`
    ROOT/guard                           locked while entries change hands
    HOME/tokens/ENTRY~…                  one per user of an entry
    HOME/work/…                          what is being made or removed

A server's own cache lies in its temp folder, which is both root and home, and goes with it. With
`archive_cache_dir` that directory is the root, several servers share it, and each has a home in it,
a `Folder` whose lock tells whether its server lives. All that must be known lies on the disk, so
that the process that does this work may end at any time.

An entry without a token is kept while there is room: the same archive may be asked for again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from mmserve.errors import StorageFailed
from mmserve.models.disk import free_bytes, remove_tree, storage_failed

#: Of what the disk has free, how much may go to entries that nobody uses.
IDLE_SHARE = 0.2
#: The same for a directory that was given to us as a cache.
PERSISTENT_IDLE_SHARE = 0.8

#: File systems stamp a file with the time of the last timer tick, and some in whole seconds: a
#: file that changed this recently may change again and look the same.
_TICK_NS = 50_000_000
_WHOLE_SECOND_NS = 2_000_000_000


class FileRecord(msgspec.Struct, array_like=True, frozen=True):
    path: str
    size: int
    mtime_ns: int


class About(msgspec.Struct, frozen=True):
    """What an entry held when it was finished."""

    size: int
    files: list[FileRecord]


class Entry(NamedTuple):
    """An unpacked archive and the right to use it.

    Attributes:
        tree: the unpacked files.
        token: given back with `Cache.release`.
        size: bytes of its files.
    """

    tree: Path
    token: str
    size: int


class Idle(NamedTuple):
    """An entry that nobody uses."""

    name: str
    size: int
    last_used: float


def surplus(idle: Iterable[Idle], budget_bytes: float) -> list[str]:
    """Which entries must go so that the rest fits the budget; the last used have first claim."""
    left = budget_bytes
    gone = []
    for entry in sorted(idle, key=lambda entry: entry.last_used, reverse=True):
        if entry.size <= left:
            left -= entry.size
        else:
            gone.append(entry.name)
    return gone


def digest_key(digest: str) -> str:
    """What an archive is recognised by, whichever file it came in."""
    return f"sha256-{digest}"


def file_key(status: os.stat_result, now_ns: int) -> str | None:
    """What a file's content can be recognised by without reading it.

    Returns:
        None for a file that changed so recently that it may change again without showing it.
    """
    changed = max(status.st_mtime_ns, status.st_ctime_ns)
    grain = _WHOLE_SECOND_NS if changed % 1_000_000_000 == 0 else _TICK_NS
    if now_ns - changed < grain:
        return None
    # The change time too: it cannot be set, while archives made by one tool on one day may well
    # agree in size and modification time, and a new file gets the inode of a deleted one.
    numbers = (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
    return "-".join(f"{number:x}" for number in numbers)


class Cache:
    """One server's view of a cache. Safe to use from several threads and processes.

    Args:
        root: of the cache.
        home: this server's folder in it; the same where nobody shares it.
    """

    def __init__(self, root: Path, home: Path) -> None:
        self.root, self.home = root, home
        self._entries, self._seen = root / "entries", root / "seen"
        self._tokens, self._work = home / "tokens", home / "work"
        self._is_shared = root != home
        self._share = PERSISTENT_IDLE_SHARE if self._is_shared else IDLE_SHARE
        self._numbers = itertools.count()

    @staticmethod
    def lay_out(root: Path, home: Path) -> None:
        """Makes the folders, so that later nothing is new but what is in them. Raises OSError."""
        for path in (root / "entries", root / "seen", home / "tokens", home / "work"):
            path.mkdir(parents=True, exist_ok=True)
        os.close(_open_guard(root))

    def clear_leftovers(self, tokens: Iterable[str]) -> None:
        """Removes what a process of this server that has ended was busy with.

        Args:
            tokens: those that the server still uses.
        """
        used = set(tokens)
        with contextlib.suppress(OSError):
            for path in self._work.iterdir():
                remove_tree(path)
            for path in self._tokens.iterdir():
                if path.name not in used:
                    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """A new folder for work, gone afterwards. Raises StorageFailed."""
        path = self._work / self._new_name("w")
        with _telling("make", path):
            path.mkdir()
        try:
            yield path
        finally:
            remove_tree(path)

    # Using entries

    def take(self, key: str) -> Entry | None:
        """The entry that a key leads to, in use from now on.

        None where there is none, or none that is as it was. Raises StorageFailed.
        """
        with self._guard():
            return self._take(key)

    def admit(self, workplace: Path, packed_bytes: int, digest: str | None) -> Entry:
        """Makes the `tree` in a workplace an entry, or takes the one of this digest.

        Raises StorageFailed.
        """
        about = describe_tree(workplace / "tree")
        with _telling("write", workplace):
            (workplace / "about").write_bytes(msgspec.json.encode(about))
        with self._guard():
            if digest is not None and (entry := self._take(digest_key(digest))) is not None:
                return entry
            final = self._entries / f"{self._new_name('')}-{packed_bytes:x}"
            token = self._new_token(final.name)
            try:
                with _telling("write", final):
                    workplace.rename(final)  # what removes the workplace finds nothing
            except BaseException:
                (self._tokens / token).unlink(missing_ok=True)
                raise
            entry = Entry(final / "tree", token, about.size)
            if digest is not None:
                self._remember(digest_key(digest), final)
            return entry

    def remember(self, key: str, entry: Entry) -> None:
        """So that `take` knows it by this key too, for as long as the entry is there."""
        with self._guard():
            self._remember(key, entry.tree.parent)

    def may_have(self, packed_bytes: int) -> bool:
        """Whether an archive of this size is there, so that it pays to hash before unpacking."""
        ending = f"-{packed_bytes:x}"
        return any(name.endswith(ending) for name in _names(self._entries))

    def release(self, token: str, *, keep: bool) -> None:
        """Gives an entry back. Without `keep` it goes, unless somebody else uses it.

        Raises StorageFailed.
        """
        name = token.partition("~")[0]
        with self._guard():
            with _telling("remove", self._tokens / token):
                (self._tokens / token).unlink(missing_ok=True)
            gone = []
            if name not in self._used() and (self._entries / name).is_dir():
                if keep and self._is_whole(name) is not None:
                    with contextlib.suppress(OSError):
                        os.utime(self._entries / name / "about")
                else:
                    gone = self._put_away([name])
        self._remove(gone)
        self.trim()

    def trim(self, needed_bytes: int = 0) -> None:
        """Removes what nobody uses and there is no room for.

        Args:
            needed_bytes: that must be free afterwards, if entries can give them.
        """
        with self._guard():
            idle = self._idle()
            unused = sum(entry.size for entry in idle)
            free = free_bytes(self.root)
            budget = self._share * (free + unused)
            if needed_bytes:
                budget = min(budget, free + unused - needed_bytes)
            gone = self._put_away(surplus(idle, budget))
        self._remove(gone)

    def make_room(self, needed_bytes: int) -> None:
        """Frees disk space for so many bytes. Raises StorageFailed where there is not enough."""
        with _telling("look at", self.root):
            if free_bytes(self.root) >= needed_bytes:
                return
        self.trim(needed_bytes)
        free = free_bytes(self.root)
        if free < needed_bytes:
            raise StorageFailed(
                f"Failed to write {self.root}: {os.strerror(errno.ENOSPC)} (ENOSPC, errno "
                f"{errno.ENOSPC}); {needed_bytes} bytes are needed, {free} are free."
            )

    # Under the guard

    def _take(self, key: str) -> Entry | None:
        try:
            name = (self._seen / key).read_text()
        except OSError:
            return None
        about = self._is_whole(name)
        if about is None:
            if name not in self._used():
                self._remove(self._put_away([name]))
            return None
        with contextlib.suppress(OSError):
            os.utime(self._entries / name / "about")
        return Entry(self._entries / name / "tree", self._new_token(name), about.size)

    def _remember(self, key: str, folder: Path) -> None:
        with contextlib.suppress(OSError):  # where this fails it is unpacked again, no more
            with (folder / "keys").open("a") as keys:
                keys.write(key + "\n")
            (self._seen / key).write_text(folder.name)

    def _is_whole(self, name: str) -> About | None:
        """What the entry holds, if all of it is as it was: a handler may write to its folder."""
        folder = self._entries / name
        try:
            about = msgspec.json.decode((folder / "about").read_bytes(), type=About)
            root = os.open(folder / "tree", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, msgspec.MsgspecError):
            return None
        try:
            for file in about.files:
                if _is_derived(file.path):
                    continue
                status = os.stat(file.path.encode("latin-1"), dir_fd=root, follow_symlinks=False)
                if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
                    return None
        except OSError:
            return None
        finally:
            os.close(root)
        return about

    def _new_name(self, prefix: str) -> str:
        return f"{prefix}{os.getpid():x}-{time.monotonic_ns():x}-{next(self._numbers):x}"

    def _new_token(self, name: str) -> str:
        token = f"{name}~{self._new_name('')}"
        with _telling("write", self._tokens / token):
            (self._tokens / token).touch(exist_ok=False)
        return token

    def _used(self) -> set[str]:
        homes = [self.home, *(self.home.parent.iterdir() if self._is_shared else [])]
        return {token.partition("~")[0] for home in homes for token in _names(home / "tokens")}

    def _idle(self) -> list[Idle]:
        used = self._used()
        idle = []
        for name in _names(self._entries):
            if name in used:
                continue
            try:
                about = self._entries / name / "about"
                size = msgspec.json.decode(about.read_bytes(), type=About).size
                idle.append(Idle(name, size, about.stat().st_mtime))
            except (OSError, msgspec.MsgspecError):
                idle.append(Idle(name, 0, 0.0))
        return idle

    def _put_away(self, names: Iterable[str]) -> list[Path]:
        """Takes entries out of the cache; whoever called removes them, outside the guard."""
        moved = []
        for name in names:
            with contextlib.suppress(OSError):
                folder = self._work / self._new_name("x")
                (self._entries / name).rename(folder)
                moved.append(folder)
                with contextlib.suppress(OSError):
                    for key in (folder / "keys").read_text().split():
                        self._forget(key, name)
        return moved

    def _forget(self, key: str, name: str) -> None:
        with contextlib.suppress(OSError):
            if (self._seen / key).read_text() == name:  # else it leads to a newer one
                (self._seen / key).unlink()

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            remove_tree(path)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        with _telling("lock", self.root / "guard"):
            fd = _open_guard(self.root)
        try:
            with _telling("lock", self.root / "guard"):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def describe_tree(tree: Path) -> About:
    """Every file and link below a folder. Raises StorageFailed."""
    files: list[FileRecord] = []
    total = 0
    with _telling("read", tree):
        for folder, _, names in os.walk(tree):
            for name in names:
                path = Path(folder, name)
                status = path.lstat()
                total += status.st_size
                # A name may be in no encoding at all; JSON wants text.
                text = os.fsencode(path.relative_to(tree)).decode("latin-1")
                files.append(FileRecord(text, status.st_size, status.st_mtime_ns))
    return About(total, files)


def _is_derived(path: str) -> bool:
    """Whether Python makes the file from a source that lies beside it.

    A worker writes it anew where it was made from another source or by another Python. Without its
    source nothing in `__pycache__` is imported; a `.pyc` elsewhere is code of its own.
    """
    return path.endswith(".pyc") and path.split("/")[-2:-1] == ["__pycache__"]


def _open_guard(root: Path) -> int:
    return os.open(root / "guard", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def _telling(action: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_failed(action, path, error) from error
