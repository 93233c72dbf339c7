"""The fetcher: the process that does all disk and network work on archives.

Started by `fetching.py` as `python -I -m mmserve.models.fetcher FD`; ends when the other end of the
socket does. It runs nothing that an archive holds. Each order has a thread, so that a download
that hangs holds up nobody; what must outlive the process lies on the disk (`cache.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mmserve.errors import DownloadFailed, InvalidModel, ServeError, SourceNotFound, StorageFailed
from mmserve.models import folder, startup
from mmserve.models.archive import unpack
from mmserve.models.cache import Cache, Entry, digest_key, file_key
from mmserve.models.digest import digest_of
from mmserve.models.disk import storage_failed
from mmserve.models.layout import (
    Layout,
    folder_names,
    module_names_any,
    names_any,
    read_layout,
)
from mmserve.models.limits import Rules
from mmserve.models.manifest import Resolved, resolve
from mmserve.models.orders import (
    Answer,
    Brought,
    Cancel,
    Configure,
    Done,
    Failed,
    Fetch,
    Frames,
    Listed,
    ListStartup,
    Order,
    Release,
    Sweep,
    frame,
)
from mmserve.models.packed import Pacing, Packed
from mmserve.models.source import (
    Remote,
    is_allowed,
    is_within,
    local_path,
    not_in_store,
    parse_remote,
    scheme_of,
    shown,
)
from mmserve.models.torchserve import may_be_torchserve, refuse_unserved
from mmserve.models.watch import Watch

_NICENESS = 5  # a third of the share that a prediction gets
_MAX_DOWNLOADS = 16  # at once; more wait. Apart from the rest, so that they do not hold it up
_MAX_UNPACKING = 8
_MAX_CHORES = 2

#: Archives up to this size are hashed before they are unpacked, which takes a hundredth of a
#: second; larger ones later, unless one of exactly that size is there.
_HASH_FIRST_BYTES = 16 << 20
_HASH_LATER_S = 0.5

#: A bomb or a memory-hungry library ends here, not in the machine's memory.
_MAX_MEMORY_BYTES = 8 << 30
_MAX_FILE_BYTES = 256 << 30
_MAX_OPEN_FILES = 1024


class Cancelled(Exception):
    """Nobody waits for the model any more, or for an error."""


_NO_SUCH_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)


class Job:
    """One fetch on its way. Stopped from the main thread."""

    def __init__(self, total_s: float) -> None:
        self.watch = Watch(total_s)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.watch.stop("it was cancelled")

    def check(self) -> None:
        if self.is_cancelled:
            raise Cancelled


class Fetcher:
    """Does the work of orders, each in the thread that calls."""

    def __init__(self, configure: Configure) -> None:
        self._configure = configure
        self._cache: Cache | None = None
        if configure.root:
            self._cache = Cache(Path(configure.root), Path(configure.home))
        # Where workers look, as far as this process can tell: `-I` keeps the variable from it.
        python_path = os.environ.get("PYTHONPATH", "")
        self._search_path = [*filter(None, python_path.split(os.pathsep)), *sys.path]
        self._locks: dict[str, tuple[threading.Lock, int]] = {}
        self._locks_lock = threading.Lock()

    @property
    def cache(self) -> Cache:
        if self._cache is None:
            raise StorageFailed(self._configure.trouble)
        return self._cache

    def clear_leftovers(self) -> None:
        if self._cache is not None:
            self._cache.clear_leftovers(self._configure.tokens)

    def fetch(self, order: Fetch, job: Job) -> Brought:
        """Raises ServeError; nothing is left behind then."""
        scheme = scheme_of(order.url, self._configure.rules)
        if scheme is not None:
            return self._fetch_remote(order, job, scheme)
        return self._fetch_local(order, job, local_path(order.url, order.store))

    def release(self, order: Release) -> Done:
        self.cache.release(order.token, keep=order.keep)
        return Done(order.id)

    def list_startup(self, order: ListStartup) -> Listed:
        """Raises nothing: what is wrong becomes a warning."""
        if not startup.is_all(order.load_models):
            found = startup.in_list(order.load_models)
        elif not order.store:
            found = startup.StartupList([], ["load_models is ALL, but there is no model_store"])
        else:
            try:
                with os.scandir(order.store) as entries:
                    found = startup.in_store([(entry.name, entry.is_dir()) for entry in entries])
            except OSError as error:
                text = str(storage_failed("read the model store", order.store, error))
                found = startup.StartupList([], [text])
        return Listed(order.id, found.models, found.warnings)

    def sweep(self, order: Sweep) -> Done:
        for path in order.folders:
            folder.clear(Path(path))
        return Done(order.id)

    # Local

    def _fetch_local(self, order: Fetch, job: Job, path: Path) -> Brought:
        assert order.store
        bounds = None if Path(order.store) == Path("/") else Path(order.store).resolve()
        try:
            # Looked at before it is opened: to open a device or a pipe may do something, or wait.
            kind = stat.S_IFMT(path.stat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                raise not_in_store(order.url, "it is neither a file nor a directory")
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _NO_SUCH_PATH:
                raise not_in_store(order.url) from None
            raise storage_failed("read", path, error) from error
        except ValueError:  # text that no file name can be
            raise not_in_store(order.url) from None
        with contextlib.closing(_Descriptor(fd)):
            if bounds is not None and not is_within(path, bounds):
                raise not_in_store(order.url, "it is a link that leads out of the store")
            if kind == stat.S_IFDIR:
                return self._brought(order, read_layout(path, bounds), None, None)
            with _named(order.url):
                return self._fetch_file(order, job, fd, path)

    def _fetch_file(self, order: Fetch, job: Job, fd: int, path: Path) -> Brought:
        status = os.fstat(fd)
        with self._one_at_a_time(f"{status.st_dev}-{status.st_ino}"):
            job.check()
            key = file_key(status, time.time_ns())
            entry = self.cache.take(key) if key else None
            if entry is not None:
                return self._settled(order, entry, None, is_new=False)
            source = Packed(fd, status.st_size, str(path))
            digest = None
            if status.st_size <= _HASH_FIRST_BYTES or self.cache.may_have(status.st_size):
                digest = digest_of(source, job.check)
                entry = self.cache.take(digest_key(digest))
                if entry is not None:
                    if key is not None:
                        self.cache.remember(key, entry)
                    return self._settled(order, entry, digest, is_new=False)
            brought, entry = self._unpack(order, job, source, digest, status)
            try:
                if key is not None:
                    self.cache.remember(key, entry)
                if digest is None:
                    self._learn_digest_later(source, entry, status)
            except BaseException:
                self.cache.release(entry.token, keep=False)
                raise
            return brought

    # Remote

    def _fetch_remote(self, order: Fetch, job: Job, scheme: str) -> Brought:
        # Slow to import, and most lives of this process download nothing.
        from mmserve.models.download import Sink, download_http, download_s3

        configure = self._configure
        if scheme == "file":
            return self._fetch_file_url(order, job)
        if scheme not in ("http", "https", "s3"):
            raise SourceNotFound(
                f"Invalid model url: {shown(order.url)} (there is no way to fetch {scheme}://)"
            )
        if scheme == "s3":
            remote = Remote(url=order.url, scheme="s3", host="", port=None, target="")
        else:
            remote = parse_remote(order.url)
        if not is_allowed(order.url, configure.rules):
            raise SourceNotFound(
                f"Invalid model url: {remote.shown} (allowed_urls does not allow it)"
            )
        limits = configure.download_limits
        with self.cache.workplace() as workplace, job.watch as watch:
            path = workplace / "download"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise storage_failed("write", path, error) from error
            with contextlib.closing(_Descriptor(fd)):
                sink = Sink(fd, str(path), limits, remote.shown)
                room = self.cache.make_room
                try:
                    if scheme == "s3":
                        download_s3(remote, sink, limits=limits, watch=watch, make_room=room)
                    else:
                        download_http(
                            remote,
                            sink,
                            rules=configure.rules,
                            limits=limits,
                            watch=watch,
                            make_room=room,
                        )
                except DownloadFailed:
                    job.check()
                    raise
                path.unlink()
                digest = sink.digest.hexdigest()
                with self._one_at_a_time(digest), _named(remote.shown):
                    job.check()
                    entry = self.cache.take(digest_key(digest))
                    if entry is not None:
                        return self._settled(order, entry, digest, is_new=False)
                    source = Packed(fd, sink.size, str(path))
                    return self._unpack(order, job, source, digest)[0]

    def _fetch_file_url(self, order: Fetch, job: Job) -> Brought:
        path = order.url.partition("://")[2].removeprefix("localhost")
        order = msgspec.structs.replace(order, store="/")
        return self._fetch_local(order, job, local_path(path, "/"))

    # Both

    def _unpack(
        self,
        order: Fetch,
        job: Job,
        source: Packed,
        digest: str | None,
        status: os.stat_result | None = None,
    ) -> tuple[Brought, Entry]:
        """Makes an archive an entry of the cache.

        Args:
            status: of a file that somebody else may write to, before it was read.
        """
        with self.cache.workplace() as workplace:
            tree = workplace / "tree"
            try:
                tree.mkdir()
            except OSError as error:
                raise storage_failed("write", tree, error) from error
            pacing = Pacing(job.check, self.cache.make_room)
            limits = self._configure.limits
            unpack(source.fd, str(tree), name=source.name, limits=limits, pacing=pacing)
            # Before anybody else can see it: a manifest that will not do leaves no trace.
            self._resolved(order, read_layout(tree, tree.resolve()))
            if status is not None and _looks(os.fstat(source.fd)) != _looks(status):
                raise InvalidModel("The file changed while it was read; try again.")
            job.check()
            entry = self.cache.admit(workplace, source.size, digest)
        return self._settled(order, entry, digest, is_new=True), entry

    def _learn_digest_later(self, source: Packed, entry: Entry, status: os.stat_result) -> None:
        """Hashes a large file once the model that it brought has had time to load.

        Hashing takes longer than copying a stored archive does, nobody waits for it, and if this
        process ends before it is done, the same archive in another file is unpacked again, no more.
        """
        source = source._replace(fd=os.dup(source.fd))

        def learn() -> None:
            if sys.platform == "linux":  # where a thread has a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            with contextlib.closing(_Descriptor(source.fd)), contextlib.suppress(ServeError):
                digest = digest_of(source)
                if _looks(os.fstat(source.fd)) == _looks(status):
                    self.cache.remember(digest_key(digest), entry)

        timer = threading.Timer(_HASH_LATER_S, learn)
        timer.daemon = True
        timer.start()

    def _settled(self, order: Fetch, entry: Entry, digest: str | None, *, is_new: bool) -> Brought:
        try:
            layout = read_layout(entry.tree, entry.tree.resolve())
            return self._brought(order, layout, entry, digest)
        except BaseException:
            self.cache.release(entry.token, keep=not is_new)
            raise

    def _brought(
        self, order: Fetch, layout: Layout, entry: Entry | None, digest: str | None
    ) -> Brought:
        resolved = self._resolved(order, layout)
        directory = Path(layout.directory)
        top_names = layout.top_names
        module, handler_folder = _handler_module(resolved.handler)
        if handler_folder:  # `dir/module.py:function` puts `dir` on the module path
            top_names = sorted({*top_names, *folder_names(directory / handler_folder)})
        return Brought(
            id=order.id,
            directory=layout.directory,
            resolved=resolved,
            manifest=layout.manifest,
            digest=digest,
            token=entry.token if entry else "",
            size=entry.size if entry else None,
            top_names=top_names,
            code_names=layout.code_names,
            names_libraries=self._names_libraries(layout, module, handler_folder),
        )

    def _names_libraries(self, layout: Layout, module: str, handler_folder: str) -> bool:
        words, directory = self._configure.libraries, Path(layout.directory)
        if may_be_torchserve(layout.manifest):
            return True  # its handler may be ours, which needs torch
        if names_any(directory, words):
            return True
        if module in layout.top_names or module in layout.code_names:
            return False
        path = [str(directory / handler_folder)] if handler_folder else self._search_path
        return module_names_any(module.partition(".")[0], path, words)

    def _resolved(self, order: Fetch, layout: Layout) -> Resolved:
        if may_be_torchserve(layout.manifest):
            refuse_unserved(layout, order.overrides.handler, self._search_path)
        return resolve(layout.manifest, order.overrides)

    @contextlib.contextmanager
    def _one_at_a_time(self, name: str) -> Iterator[None]:
        """Whoever wants the same archive meanwhile waits, and then finds it unpacked."""
        with self._locks_lock:
            lock, users = self._locks.get(name, (threading.Lock(), 0))
            self._locks[name] = lock, users + 1
        try:
            with lock:
                yield
        finally:
            with self._locks_lock:
                lock, users = self._locks.pop(name)
                if users > 1:
                    self._locks[name] = lock, users - 1


class _Descriptor:
    """An open file, for `contextlib.closing`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


def _looks(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _handler_module(handler: str) -> tuple[str, str]:
    """Module and folder of a handler text: `dir/service.py:handle` is ("service", "dir")."""
    path = handler.rpartition(":")[0] or handler
    where, _, file_name = path.rpartition("/")
    return file_name.removesuffix(".py"), where


@contextlib.contextmanager
def _named(url: str) -> Iterator[None]:
    """Says in front of what is wrong with an archive which one it is."""
    try:
        yield
    except InvalidModel as error:
        if str(error).startswith(_SPEAKS_OF_ARCHIVE):
            raise InvalidModel(f"{url}: {error}") from error
        raise


#: Not the texts of section 5.4 of the contract, which clients compare.
_SPEAKS_OF_ARCHIVE = ("It is not", "The ")


# The process


class Crew:
    """Threads that work off a queue, each started when the others are busy.

    Not `concurrent.futures`, which takes a fifth of this process's start and waits for its
    threads at the end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._queue: queue.SimpleQueue[tuple[Callable[..., None], tuple[object, ...]]]
        self._queue = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, work: Callable[..., None], *arguments: object) -> None:
        """Called by one thread only; `work` raises nothing."""
        self._queue.put((work, arguments))
        if not self._idle.acquire(blocking=False) and self._count < self._most:
            self._count += 1
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work, arguments = self._queue.get()
            work(*arguments)
            self._idle.release()


class Service:
    """Reads orders from a socket and answers them, until the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._downloads = Crew(_MAX_DOWNLOADS)
        self._unpacking = Crew(_MAX_UNPACKING)
        self._chores = Crew(_MAX_CHORES)

    def run(self) -> None:
        frames = Frames()
        decoder = msgspec.msgpack.Decoder(Order)
        fetcher: Fetcher | None = None
        rules = Rules()
        while data := self._sock.recv(1 << 16):
            for piece in frames.feed(data):
                order = decoder.decode(piece)
                if isinstance(order, Configure):
                    fetcher, rules = Fetcher(order), order.rules
                    fetcher.clear_leftovers()
                    limit_s = order.download_limits.total_s
                    continue
                assert fetcher is not None, "the first message configures"
                match order:
                    case Fetch():
                        job = self._jobs[order.id] = Job(limit_s)
                        is_remote = scheme_of(order.url, rules) not in (None, "file")
                        pool = self._downloads if is_remote else self._unpacking
                        pool.submit(self._do, order.id, fetcher.fetch, order, job)
                    case Cancel():
                        if (cancelled := self._jobs.get(order.id)) is not None:
                            cancelled.cancel()
                    case Release():
                        self._chores.submit(self._do, order.id, fetcher.release, order)
                    case ListStartup():
                        self._chores.submit(self._do, order.id, fetcher.list_startup, order)
                    case Sweep():
                        self._chores.submit(self._do, order.id, fetcher.sweep, order)

    def _do(self, order_id: int, work: Callable[..., Answer], *arguments: object) -> None:
        """One order, in its thread: the door where everything is caught."""
        try:
            answer = work(*arguments)
        except ServeError as error:
            answer = Failed(order_id, type(error).__name__, str(error))
        except Cancelled:
            answer = Failed(order_id, "StorageFailed", "The registration was cancelled.")
        except Exception as error:
            traceback.print_exc()
            text = f"The model could not be fetched: {type(error).__name__}: {error}"
            answer = Failed(order_id, "StorageFailed", text)
        self._jobs.pop(order_id, None)
        try:
            data = frame(answer)
        except UnicodeEncodeError:  # a path in no encoding, in a message or as a directory
            data = frame(Failed(order_id, "InvalidModel", "A file name is in no known encoding."))
        # An error: the front is gone, and the main thread is about to notice.
        with self._sending, contextlib.suppress(OSError):
            self._sock.sendall(data)


def limit_process() -> None:
    """Low priority, and bounds on memory, file size and descriptors."""
    os.nice(_NICENESS)
    os.umask(0o022)
    for kind, value in (
        (resource.RLIMIT_AS, _MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, _MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(OSError, ValueError):
            soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (soft, hard))


def main() -> None:
    # A terminal's Ctrl-C and a supervisor's SIGTERM to the group are the front's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    limit_process()
    with contextlib.suppress(ConnectionError):
        Service(socket.socket(fileno=int(sys.argv[1]))).run()
    # Not `sys.exit`, which would wait for downloads that nobody wants.
    os._exit(0)


if __name__ == "__main__":
    main()
