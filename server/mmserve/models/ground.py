"""Writes an archive's files below one folder, and nowhere else."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Protocol, Self

from mmserve.errors import InvalidModel, ServeError
from mmserve.models.disk import storage_failed
from mmserve.models.entries import Parts, quoted


class Write(Protocol):
    """Writes to a new file."""

    def __call__(self, piece: bytes | memoryview, at: int | None = None) -> None:
        """Where the last write ended, or at an offset: then from any thread.

        Raises StorageFailed.
        """


class Ground:
    """The folder that an archive is unpacked into. No step of a path is a link."""

    _FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    _NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

    def __init__(self, path: str) -> None:
        self._path = path
        self._made: set[Parts] = {()}
        self._root = -1

    def __enter__(self) -> Self:
        with self._telling(()):
            self._root = os.open(self._path, self._FOLDER)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def make_folder(self, parts: Parts) -> None:
        """With those above it, where they are not there yet."""
        if parts in self._made:
            return
        self.make_folder(parts[:-1])
        with self._telling(parts), self._folder(parts[:-1]) as folder:
            os.mkdir(parts[-1], 0o755, dir_fd=folder)
        self._made.add(parts)

    @contextlib.contextmanager
    def new_file(self, parts: Parts, *, is_program: bool) -> Iterator[Write]:
        """Yields what writes to it. Owner and mode are ours; only the right to execute is kept."""
        with self._telling(parts), self._folder(parts[:-1]) as folder:
            fd = os.open(parts[-1], self._NEW, 0o755 if is_program else 0o644, dir_fd=folder)

        def write(piece: bytes | memoryview, at: int | None = None) -> None:
            while piece:
                try:
                    count = os.write(fd, piece) if at is None else os.pwrite(fd, piece, at)
                except OSError as error:
                    raise self._failed(parts, error) from error
                if count == len(piece):
                    return
                piece = memoryview(piece)[count:]
                at = None if at is None else at + count

        try:
            yield write
        finally:
            with self._telling(parts):  # some file systems say only here that they are full
                os.close(fd)

    def make_link(self, parts: Parts, target: str) -> None:
        with self._telling(parts), self._folder(parts[:-1]) as folder:
            os.symlink(target, parts[-1], dir_fd=folder)

    def make_hard_link(self, original: Parts, parts: Parts) -> None:
        with (
            self._telling(parts),
            self._folder(original[:-1]) as there,
            self._folder(parts[:-1]) as here,
        ):
            os.link(
                original[-1], parts[-1], src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False
            )

    @contextlib.contextmanager
    def _folder(self, parts: Parts) -> Iterator[int]:
        """A descriptor of a folder made before, reached without following a link."""
        fd = self._root
        try:
            for part in parts:
                above, fd = fd, os.open(part, self._FOLDER, dir_fd=fd)
                if above != self._root:
                    os.close(above)
            yield fd
        finally:
            if fd != self._root:
                os.close(fd)

    @contextlib.contextmanager
    def _telling(self, parts: Parts) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(parts, error) from error

    def _failed(self, parts: Parts, error: OSError) -> ServeError:
        if error.errno in _IMPOSSIBLE_NAME:
            why = os.strerror(error.errno)
            return InvalidModel(
                f"The archive entry {quoted('/'.join(parts))} cannot be made here: {why}."
            )
        return storage_failed("write", "/".join((self._path, *parts)), error)


#: Two names that are one on this file system, or a name that it cannot hold.
_IMPOSSIBLE_NAME = (errno.EEXIST, errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL)
