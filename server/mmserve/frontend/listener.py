"""A listener: its sockets, who is let in, and its end.

We accept by hand. The event loops' own servers either retry in a way that fills the log (asyncio)
or close the listening socket (uvloop) when file descriptors run out, neither tells a failed TLS
handshake from a real error, and a certificate could not be replaced while they run.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from mmserve.config.addresses import Address
from mmserve.errors import ConfigurationError
from mmserve.frontend.edge import Connection, Edge, Limits, Observer
from mmserve.frontend.http import Application
from mmserve.frontend.tls import TlsSource

log = logging.getLogger(__name__)

BACKLOG = 1024
#: Connections accepted in a row before those that are there have their turn.
ACCEPT_TURN = 64
#: How long accepting pauses when file descriptors or memory run out.
ACCEPT_PAUSE_S = 0.5
#: Of a unix socket: the owner and the group may connect.
SOCKET_MODE = 0o660
#: Seconds a TLS connection may take to say goodbye.
TLS_SHUTDOWN_S = 2.0
#: At least this long between two log lines that say the same of different clients.
QUIET_S = 10.0

_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
#: The peer or the network gave up before we accepted; the next one may be fine (accept(2)).
_HARMLESS = frozenset(
    {
        *(errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.ENETDOWN),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)


class Listener:
    """An open listener, made by `open_listener`.

    Attributes:
        address: as configured.
        port: the bound port; 0 for a unix socket.
    """

    def __init__(
        self, address: Address, sockets: list[socket.socket], edge: Edge, tls: TlsSource | None
    ) -> None:
        self.address = address
        self.port: int = 0 if address.is_unix else sockets[0].getsockname()[1]
        self._sockets, self._edge = sockets, edge
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._context = tls.context() if tls else None
        self._arrivals: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()
        self._said: dict[str, float] = {}
        self._inode = _inode(address.path) if address.is_unix else None
        edge.on_empty = self._look_around
        for one in sockets:
            self._loop.add_reader(one, self._accept, one)
        self._next_sweep = self._loop.call_later(edge.sweep_interval_s(), self._sweep)

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._edge.connections)

    def reload_tls(self) -> None:
        """Reads the certificate again: new connections get it. A bad one keeps the old."""
        if self._tls is None:
            return
        try:
            self._context = self._tls.context()
        except ConfigurationError as error:
            log.error(
                "certificate not reloaded, the old one stays",
                extra={"address": self.address.url, "cause": str(error)},
            )
        else:
            log.info("certificate reloaded", extra={"address": self.address.url})

    async def drain(self, deadline: float) -> None:
        """Stops listening and lets the requests in work finish.

        Connections that no request is in work on are closed; a request that comes now, on one
        that was waiting to be accepted, gets 503. Returns when no connection is left.

        Args:
            deadline: `time.monotonic()` at which whatever is left is cut.
        """
        self._stop_listening()
        self._edge.drain()
        self._look_around()
        try:
            async with asyncio.timeout(max(0.0, deadline - monotonic())):
                await self._is_over.wait()
        except TimeoutError:
            for task in self._arrivals:
                task.cancel()
            self._edge.abort()
            await self._is_over.wait()
        finally:
            self._next_sweep.cancel()

    def _stop_listening(self) -> None:
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            self._loop.remove_reader(one)
            self._accept(one, BACKLOG)  # those whose connect has succeeded already
            one.close()
        if self._inode is not None and _inode(self.address.path) == self._inode:
            Path(self.address.path).unlink(missing_ok=True)
        self._inode = None

    def _look_around(self) -> None:
        if not self._sockets and not self._arrivals and not self._edge.connections:
            self._is_over.set()

    def _sweep(self) -> None:
        self._next_sweep = self._loop.call_later(self._edge.sweep_interval_s(), self._sweep)
        self._edge.sweep(monotonic())

    # Letting in

    def _accept(self, listening: socket.socket, turn: int = ACCEPT_TURN) -> None:
        for _ in range(turn):
            try:
                client, address = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _HARMLESS:
                    continue
                self._pause(listening, error)
                return
            client.setblocking(False)
            task = self._loop.create_task(self._let_in(client, peer_text(client.family, address)))
            self._arrivals.add(task)
            task.add_done_callback(self._arrived)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """The socket stays readable: without a pause the loop would spin on it."""
        if self._may_say("accept"):
            level = logging.WARNING if error.errno in _OUT_OF_RESOURCES else logging.ERROR
            log.log(
                level,
                "cannot accept connections, trying again soon",
                extra={"address": self.address.url, "cause": os.strerror(error.errno or 0)},
            )
        self._loop.remove_reader(listening)
        self._loop.call_later(ACCEPT_PAUSE_S, self._unpause, listening)

    def _unpause(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._arrivals.discard(task)
        if not self._sockets:
            self._look_around()

    async def _let_in(self, client: socket.socket, peer: str) -> None:
        """Makes a connection of an accepted socket; with TLS after the handshake."""
        more: dict[str, Any] = {}
        if self._context is not None:
            more = {
                "ssl": self._context,
                "ssl_handshake_timeout": self._edge.limits.handshake_s,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_S,
            }
        try:
            await self._loop.connect_accepted_socket(
                lambda: Connection(self._edge, peer), client, **more
            )
        except ssl.SSLError as error:
            if self._may_say("handshake"):
                log.info("TLS handshake failed", extra={"peer": peer, "cause": handshake(error)})
        except OSError as error:
            log.debug("client left early", extra={"peer": peer, "cause": str(error)})

    def _may_say(self, what: str) -> bool:
        """Scanners and balancers would otherwise fill the log."""
        now = monotonic()
        if now - self._said.get(what, -QUIET_S) < QUIET_S:
            return False
        self._said[what] = now
        return True


@contextlib.asynccontextmanager
async def open_listener(
    address: Address,
    application: Application,
    *,
    key: str = "inference_address",
    limits: Limits | None = None,
    cors: Sequence[tuple[str, str]] = (),
    observer: Observer | None = None,
    tls: TlsSource | None = None,
) -> AsyncIterator[Listener]:
    """Listens for the length of a block; afterwards no socket, connection or file is left.

    Leaving the block cuts what is open: `drain` first to let it finish.

    Args:
        key: the setting that `address` comes from, for the error.
        limits: the defaults of `Limits` when None.
        cors: headers that every reply carries (`edge.cors_of`).
        observer: told of each exchange that is over.
        tls: where the certificate of an https address comes from; self-signed when None.

    Raises:
        ConfigurationError: the address cannot be bound, or the certificate cannot be used; the
            message names the setting.
    """
    if address.is_tls:
        tls = tls or TlsSource()
        tls.context()  # before the port is taken
    edge = Edge(application, limits or Limits(), cors=cors, observer=observer)
    sockets = await _bind(address, key)
    listener = Listener(address, sockets, edge, tls if address.is_tls else None)
    try:
        yield listener
    finally:
        await listener.drain(monotonic())


def install_exception_handler(loop: asyncio.AbstractEventLoop) -> None:
    """Keeps what clients do to their sockets out of the error log.

    The loops report some failures of a transport (a reset in mid-write, rubbish inside a TLS
    stream) as unhandled exceptions, with a trace. Those go to the debug log; real errors stay.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        has_transport = "transport" in context or "protocol" in context
        if has_transport and isinstance(error, OSError):  # ssl.SSLError is one
            log.debug("connection failed", extra={"cause": str(error)})
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def peer_text(family: int, address: Any) -> str:
    """A client's address as the access log shows it; `0.0.0.0` on a unix socket."""
    if family == socket.AF_INET:
        return f"{address[0]}:{address[1]}"
    if family == socket.AF_INET6:
        host: str = address[0]
        if host.startswith("::ffff:") and "." in host:
            return f"{host[7:]}:{address[1]}"  # IPv4 on a dual-stack socket
        return f"[{host}]:{address[1]}"
    return "0.0.0.0"


def handshake(error: ssl.SSLError) -> str:
    """Why a handshake failed, in words."""
    reason = error.reason or str(error)
    if reason in ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST"):
        return "the client spoke plain HTTP; this address is https"
    if reason in ("WRONG_VERSION_NUMBER", "UNEXPECTED_MESSAGE", "RECORD_TOO_SMALL"):
        return "the client did not speak TLS"
    return reason.lower().replace("_", " ")


# Binding


async def _bind(address: Address, key: str) -> list[socket.socket]:
    try:
        if address.is_unix:
            return [_bind_unix(address.path)]
        return await _bind_tcp(address.host, address.port)
    except OSError as error:
        why = error.strerror or str(error)
        number = f" (errno {error.errno})" if error.errno else ""
        what = f"{key}: cannot listen on {_shown(address)}: {why}{number}"
        if error.errno == errno.EADDRINUSE:
            another = "path" if address.is_unix else "port"
            what += f"; stop what listens there, or give {key} another {another}"
        raise ConfigurationError(what) from None


def _shown(address: Address) -> str:
    return address.url.partition("://")[2] or address.url


async def _bind_tcp(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host; all have the same port."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    first_error: OSError | None = None
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            if sockets and not port:  # "any port" means the same for all
                port = sockets[0].getsockname()[1]
            try:
                sockets.append(_listen(family, kind, protocol, (where[0], port, *where[2:])))
            except OSError as error:
                # A name such as localhost may resolve to a family this machine lacks.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                first_error = first_error or error
        if not sockets:
            raise first_error or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def _listen(family: int, kind: int, protocol: int, where: tuple[Any, ...]) -> socket.socket:
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            only_v6 = where[0] != "::"  # [::] takes IPv4 clients too
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        listening.bind(where)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _bind_unix(path: str) -> socket.socket:
    _make_way(path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(path)
        # Nobody can connect before `listen`: the mode is right from the first moment.
        os.chmod(path, SOCKET_MODE)  # noqa: PTH101 - a text path everywhere in this function
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening


def _make_way(path: str) -> None:
    """Removes a socket that nobody listens on any more.

    Raises:
        OSError: something else is there, or somebody listens.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError("there is a file that is no socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # noqa: PTH108 - as above
            return
        except BlockingIOError:
            pass  # its backlog is full: somebody is there
    raise OSError(errno.EADDRINUSE, "another process listens on this socket")


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
