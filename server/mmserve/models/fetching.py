"""The front's side of the fetcher: asks for models and gives them back. Never touches an archive.

The process starts with the server, is let go when nobody has asked for a while, and starts again
when somebody does. What it hands out stays on the disk until its lease is released, whether the
process lives or not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from mmserve.config.launch import isolated_python
from mmserve.config.report import mask_urls
from mmserve.config.settings import Settings
from mmserve.errors import BadRequest, ConfigurationError, StorageFailed
from mmserve.models import folder
from mmserve.models.cache import Cache
from mmserve.models.disk import storage_failed
from mmserve.models.limits import DownloadLimits, Limits, Rules
from mmserve.models.manifest import Manifest, Overrides
from mmserve.models.orders import (
    Answer,
    Brought,
    Cancel,
    Configure,
    Failed,
    Fetch,
    Frames,
    Listed,
    ListStartup,
    Release,
    Sweep,
    failure,
    frame,
)

log = logging.getLogger("mmserve.models")

#: What code that uses the default of `preload_imports` cannot help naming.
_DEFAULT_LIBRARIES = ("torch", "transformers")

#: Seconds without a request after which the process is let go: it starts again in a tenth of a
#: second, and an idle server should be small.
IDLE_S = 30.0
#: Seconds that a start waits for what dead servers have left to be removed.
_SWEEP_LIMIT_S = 5.0
#: Seconds after which a fetcher whose socket is closed is killed.
_END_LIMIT_S = 1.0
_READ_BYTES = 1 << 18

_ANSWERS = msgspec.msgpack.Decoder(Answer)


class Lease:
    """The right to use a model's directory. It stays as it is until this is released."""

    def __init__(self, release: Callable[[bool], asyncio.Future[None]]) -> None:
        self._release = release
        self._gone: asyncio.Future[None] | None = None

    def release(self, *, keep: bool = True) -> asyncio.Future[None]:
        """Gives the directory back. A second call changes nothing.

        Args:
            keep: the unpacked archive may stay while there is room, for the next who asks; False
                removes it unless somebody else uses it.

        Returns:
            Done when the fetcher has dealt with it; need not be awaited, and never fails.
        """
        if self._gone is None:
            self._gone = self._release(keep)
        return self._gone

    async def released(self) -> None:
        """Returns when the fetcher has dealt with the release."""
        if self._gone is not None:
            await asyncio.shield(self._gone)


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """A model that lies on the disk, ready to be loaded.

    Attributes:
        directory: absolute; of the model itself, below any folder that wraps it.
        name, handler, runtime, version, engine: what the registration, the manifest and the
            settings make of it together.
        manifest: as read; an empty one where there is none.
        manifest_text: of the manifest file, or "".
        digest: of the archive; None for a directory that is used in place, and where it is not
            known yet: nobody waits for it.
        size_bytes: of all its files; None for a directory that is used in place.
        top_names: modules and packages at the top of the directory, and in the handler's folder.
        code_names: those in its folder `code`.
        names_libraries: its sources or its handler's name a library that the server preloads, or
            may do.
        lease: to be released when the model is gone.
        prepared_dir: where its workers may put what they make of its weights; "" for nowhere. It
            is gone with the server.
    """

    directory: str
    name: str
    handler: str
    runtime: str
    version: str | None
    engine: str | None
    manifest: Manifest
    manifest_text: str
    digest: str | None
    size_bytes: int | None
    top_names: list[str]
    code_names: list[str]
    names_libraries: bool
    lease: Lease
    prepared_dir: str = ""


class _Ended(Exception):
    """The fetcher process ended before it answered."""


class Fetcher:
    """Brings models to the disk. Made by `open_fetcher`; used from one event loop only."""

    def __init__(
        self,
        settings: Settings,
        temp_dir: Path,
        limits: Limits,
        download_limits: DownloadLimits,
        idle_s: float,
    ) -> None:
        # A worker has another current directory.
        self._settings, self._temp_dir = settings, temp_dir.absolute()
        self._rules = rules_of(settings)
        self._limits, self._download_limits = limits, download_limits
        self._idle_s = idle_s
        self._loop = asyncio.get_running_loop()
        self._home: folder.Folder | None = None
        self._root = ""
        self._trouble = ""
        self._preparing = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._tokens: set[str] = set()
        self._link: _Link | None = None
        self._reaping: set[asyncio.Future[None]] = set()
        self._idle: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def fetch(
        self,
        url: str,
        *,
        model_name: str | None = None,
        handler: str | None = None,
        runtime: str | None = None,
        default_name: str | None = None,
        default_handler: str | msgspec.UnsetType | None = msgspec.UNSET,
        model_store: str | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> Fetched:
        """Brings a model, and finds out what it is called and how it is run.

        Cancelling it ends the download or the unpacking, and leaves nothing.

        Args:
            url: of a registration: a path below the model store, or a URL.
            model_name, handler, runtime: of the registration; win over the manifest.
            default_name: where neither says one; `manifest.default_model_name` for a model that
                is loaded at start.
            default_handler, model_store: in place of the settings'.

        Raises:
            SourceNotFound, DownloadFailed, InvalidModel, BadRequest: what was asked for.
            StorageFailed: our disk or our processes.
        """
        settings = self._settings
        if default_handler is msgspec.UNSET:
            default_handler = settings.default_service_handler
        if model_store is msgspec.UNSET:
            model_store = settings.model_store
        overrides = Overrides(
            model_name=model_name,
            handler=handler,
            runtime=runtime,
            default_name=default_name,
            default_handler=default_handler,
        )
        try:
            for text in (url, model_name, handler, runtime):
                (text or "").encode()
        except UnicodeEncodeError:
            raise BadRequest("The registration holds text in no encoding.") from None
        if self._home is None:
            await self._try_again()
        for is_last in (False, True):
            order = Fetch(next(self._numbers), url, model_store, overrides)
            try:
                answer = await self._ask(order)
            except _Ended as error:
                # One archive may have brought it down while it worked on several: another try.
                if is_last:
                    raise StorageFailed(f"{error} Its model was {mask_urls(url)!r}.") from None
                continue
            assert isinstance(answer, Brought)
            return self._fetched(answer)
        raise AssertionError("the loop returns or raises")

    async def startup_models(
        self, load_models: str, model_store: str | msgspec.UnsetType | None = msgspec.UNSET
    ) -> list[tuple[str | None, str]]:
        """Which models to load at start: (name where the list gives one, url).

        What is wrong with the list is logged. Raises StorageFailed when no process can be started.
        """
        if model_store is msgspec.UNSET:
            model_store = self._settings.model_store
        try:
            answer = await self._ask(ListStartup(next(self._numbers), load_models, model_store))
        except _Ended as error:
            raise StorageFailed(str(error)) from None
        assert isinstance(answer, Listed)
        for warning in answer.warnings:
            log.warning(mask_urls(warning))
        return answer.models

    # Life

    async def start(self) -> None:
        """Makes our folder, starts the process, and removes what dead servers have left.

        The process comes up beside everything else that does, so that the first registration,
        which is often due at once, need not wait for it.

        Raises ConfigurationError: `archive_cache_dir` cannot be used.
        """
        stale = await asyncio.to_thread(self._prepare)
        if stale:
            with contextlib.suppress(_Ended, StorageFailed, TimeoutError):
                async with asyncio.timeout(_SWEEP_LIMIT_S):
                    await self._ask(Sweep(next(self._numbers), [str(path) for path in stale]))
        if self._link is None:
            with contextlib.suppress(StorageFailed):  # the first request will say so
                self._link = self._start_process()
                self._await_idleness()

    async def close(self) -> None:
        """Ends the process and removes our folder."""
        self._is_closed = True
        self._let_go()
        await asyncio.gather(*self._reaping)
        if self._home is not None:
            await asyncio.to_thread(self._home.close)

    async def _try_again(self) -> None:
        """The disk refused our folder before; it may have been repaired."""
        async with self._preparing:
            if self._home is None:
                await asyncio.to_thread(self._prepare)
                if self._link is not None:
                    self._link.send(frame(self._configure()))

    def _prepare(self) -> list[Path]:
        """Makes our folder where it can be made. Folders of dead servers. Blocks."""
        cache_dir = self._settings.archive_cache_dir
        parents = [self._temp_dir]
        parent = self._temp_dir
        if cache_dir:
            parent = Path(cache_dir).absolute() / "users"
            parents.append(parent)
        stale = [path for place in parents for path in folder.stale(place)]
        home = None
        try:
            home = folder.Folder.make(parent)
            root = parent.parent if cache_dir else home.path
            Cache.lay_out(root, home.path)
        except OSError as error:
            if home is not None:
                home.close()
            if cache_dir:
                why = storage_failed("write", error.filename or cache_dir, error)
                raise ConfigurationError(f"archive_cache_dir: {why}") from error
            self._trouble = str(storage_failed("make a folder in", parent, error))
            return stale
        self._home, self._root = home, str(root)
        return stale

    # Asking

    def _fetched(self, answer: Brought) -> Fetched:
        if answer.token:
            self._tokens.add(answer.token)
        resolved = answer.resolved
        return Fetched(
            directory=answer.directory,
            name=resolved.name,
            handler=resolved.handler,
            runtime=resolved.runtime,
            version=resolved.version,
            engine=resolved.engine,
            manifest=answer.manifest,
            manifest_text=answer.manifest.text,
            digest=answer.digest,
            size_bytes=answer.size,
            top_names=answer.top_names,
            code_names=answer.code_names,
            names_libraries=answer.names_libraries,
            lease=Lease(lambda keep: self._release(answer.token, keep=keep)),
            prepared_dir=str(self._home.path / "prepared") if self._home is not None else "",
        )

    def _release(self, token: str, *, keep: bool) -> asyncio.Future[None]:
        done = self._loop.create_future()
        self._tokens.discard(token)
        if not token or self._is_closed:
            done.set_result(None)
            return done

        def settle(answer: asyncio.Future[Answer]) -> None:
            # A fetcher that ended meanwhile: the next one is told which tokens are in use.
            error = None if answer.cancelled() else answer.exception()
            if error is not None and not isinstance(error, _Ended):
                log.warning("an unpacked archive cannot be released: %s", error)
            if not done.done():
                done.set_result(None)

        try:
            answer = self._send(Release(next(self._numbers), token, keep))
        except StorageFailed as error:
            log.warning("an unpacked archive cannot be released: %s", error)
            done.set_result(None)
        else:
            answer.add_done_callback(settle)
        return done

    async def _ask(self, order: Fetch | ListStartup | Sweep) -> Answer:
        answer = self._send(order)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._pending.pop(order.id, None) is not None and self._link is not None:
                self._link.send(frame(Cancel(order.id)))
            elif answer.done() and not answer.cancelled() and answer.exception() is None:
                self._give_back(answer.result())  # it was answered in the same turn of the loop
            raise

    def _send(self, order: Fetch | ListStartup | Sweep | Release) -> asyncio.Future[Answer]:
        """Sends an order; a process is started for it where none runs. Raises StorageFailed."""
        if self._is_closed:
            raise StorageFailed("The server is stopping.")
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if self._link is None:
            self._link = self._start_process()
        self._pending[order.id] = answer
        self._link.send(frame(order))
        return answer

    def _start_process(self) -> _Link:
        try:
            link = _Link(self._loop, self._on_answer, self._on_end)
        except OSError as error:
            raise storage_failed("start", "the fetcher process", error) from error
        link.send(frame(self._configure()))
        return link

    def _configure(self) -> Configure:
        return Configure(
            self._root,
            str(self._home.path) if self._home is not None else "",
            self._trouble,
            self._rules,
            self._limits,
            self._download_limits,
            libraries_of(self._settings),
            sorted(self._tokens),
        )

    def _on_answer(self, data: bytes) -> None:
        answer = _ANSWERS.decode(data)
        waiter = self._pending.pop(answer.id, None)
        if waiter is None or waiter.done():
            self._give_back(answer)
        elif isinstance(answer, Failed):
            waiter.set_exception(failure(answer))
        else:
            waiter.set_result(answer)
        if not self._pending and self._idle is None:
            self._await_idleness()

    def _await_idleness(self) -> None:
        self._idle = self._loop.call_later(self._idle_s, self._let_go)

    def _give_back(self, answer: Answer) -> None:
        """Whoever asked is gone: what was brought was for nobody."""
        if isinstance(answer, Brought) and answer.token:
            self._release(answer.token, keep=False)

    def _on_end(self, link: _Link) -> None:
        """The process is gone, or about to be."""
        if link is self._link:
            self._link = None
        reaping = self._loop.run_in_executor(None, link.reap)
        self._reaping.add(reaping)
        reaping.add_done_callback(self._reaping.discard)
        lost, self._pending = self._pending, {}
        for waiter in lost.values():
            if not waiter.done():
                waiter.set_exception(_Ended("The fetcher process ended before it was done."))

    def _let_go(self) -> None:
        """Ends the process by closing its socket; what it was busy with is lost."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._link is not None:
            self._link.close()


class _Link:
    """One fetcher process and our end of its socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_answer: Callable[[bytes], None],
        on_end: Callable[[_Link], None],
    ) -> None:
        """Starts the process. Raises OSError."""
        self._loop, self._on_answer, self._on_end = loop, on_answer, on_end
        self._frames = Frames()
        self._unsent = bytearray()
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [
                        *isolated_python(),
                        "-m",
                        "mmserve.models.fetcher",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        loop.add_reader(self._socket, self._read)

    def send(self, data: bytes) -> None:
        """Never blocks. Nothing happens once the process has ended."""
        if self._socket.fileno() < 0:
            return
        self._unsent += data
        if len(self._unsent) == len(data):
            self._write()

    def close(self) -> None:
        """The process ends when it sees the end of its socket."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._on_end(self)

    def reap(self) -> None:
        """Waits for the process's end, and insists. Blocks."""
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            for piece in self._frames.feed(data):
                self._on_answer(piece)
        except (ValueError, msgspec.MsgspecError) as error:
            # A process that reads strangers' archives: it is not to be talked to any more.
            log.error("the fetcher's message makes no sense", extra={"cause": str(error)})
            self._process.kill()
            self.close()

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # the reader sees the end
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(self._socket, self._write)
        else:
            self._loop.remove_writer(self._socket)


@contextlib.asynccontextmanager
async def open_fetcher(
    settings: Settings,
    temp_dir: str | Path,
    *,
    limits: Limits | None = None,
    download_limits: DownloadLimits | None = None,
    idle_s: float = IDLE_S,
) -> AsyncIterator[Fetcher]:
    """A fetcher whose process, folders and unpacked archives are gone afterwards.

    Args:
        temp_dir: where its folder lies, which holds what is unpacked.
        limits, download_limits: of archives and downloads; those of `limits.py` by default.
        idle_s: seconds without a request after which the process is let go.

    Raises:
        ConfigurationError: `allowed_urls` or `archive_cache_dir` cannot be used.
    """
    fetcher = Fetcher(
        settings,
        Path(temp_dir),
        limits or Limits(),
        download_limits or DownloadLimits(),
        idle_s,
    )
    await fetcher.start()
    try:
        yield fetcher
    finally:
        await fetcher.close()


def rules_of(settings: Settings) -> Rules:
    """What may be downloaded. Raises ConfigurationError."""
    schemes = [scheme.strip().lower() for scheme in settings.allowed_url_schemes.split(",")]
    try:
        re.compile(settings.allowed_urls)
    except re.error as error:
        raise ConfigurationError(
            f"allowed_urls: {settings.allowed_urls!r} is not a regular expression: {error}"
        ) from error
    return Rules(schemes=tuple(filter(None, schemes)), urls=settings.allowed_urls)


def libraries_of(settings: Settings) -> list[str]:
    """What a source that uses a preloaded library is bound to name."""
    if settings.preload_imports == "default":
        return list(_DEFAULT_LIBRARIES)
    if settings.preload_imports == "none":
        return []
    modules = [module.strip() for module in settings.preload_imports.split(",")]
    return sorted({module.partition(".")[0] for module in modules if module})
