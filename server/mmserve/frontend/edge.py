"""HTTP/1.1 on one connection: bytes from a transport, exchanges for the application, replies back.

llhttp judges the heads (`head.py`); here are order, limits and time:

* One request of a connection is in work at a time, so replies leave in the order of their
  requests. What a client sends meanwhile piles up to `PILE_BYTES`, then reading pauses.
* What is wrong with a request is answered before its body is read, and the connection then stays
  half open for a while (`LINGER_S`), so that a client that is still sending can read why.
* Nobody has a timer. `Edge.sweep` looks at all connections of a listener now and then.

A keep-alive client sends the same head again and again: each connection remembers the last one
and what it meant.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from time import monotonic
from typing import TYPE_CHECKING, cast

import msgspec

from mmserve.errors import (
    BodyTooLarge,
    ExpectationUnknown,
    PredictionFailed,
    RequestTimedOut,
    ServeError,
    ShuttingDown,
    UnsupportedCoding,
)
from mmserve.frontend.chunks import Chunks
from mmserve.frontend.head import CHUNKED, END, Head, check_begun, parse_head, with_length
from mmserve.frontend.http import Application, Exchange, Request, Response
from mmserve.frontend.ids import fresh_id
from mmserve.frontend.inflate import GZIP_NAMES, Inflater
from mmserve.frontend.problems import problem
from mmserve.frontend.reply import BODYLESS, Heads, Unsendable

if TYPE_CHECKING:
    from mmserve.config.settings import Settings

log = logging.getLogger(__name__)

#: Bytes of further requests that may wait behind the one in work.
PILE_BYTES = 65_536
#: A reply's body from this size on is written by itself, without a copy.
LARGE_BYTES = 65_536
#: Requests of one connection answered in a row before other connections have their turn.
TURN = 64
#: A head up to this size is remembered.
REMEMBERED_BYTES = 2048
#: After an early error: seconds without a byte, seconds in all, and bytes read and thrown away.
LINGER_S, LINGER_ALL_S, LINGER_BYTES = 2.0, 30.0, 64 << 20
#: While draining: seconds for a client that was waiting to be accepted to say something, and
#: for one that got an error to stop.
LAST_WORD_S = 1.0
#: Status shown to the observer for a request whose client left before the reply. Source: nginx.
CLIENT_LEFT = 499

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REQUEST_LINE = re.compile(rb"([A-Z]{1,20}) ([!-~]{1,4096}) HTTP/1\.([01])\r\n")

#: Told once of each exchange that is over: exchange, status, seconds since its head was complete,
#: bytes of the reply (head and body).
Observer = Callable[[Exchange, int, float, int], None]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may take.

    Attributes:
        max_body_bytes: of a request, de-chunked and inflated.
        idle_s: between two requests of a connection.
        header_s: from the first byte of a head to its end.
        body_s: without a byte of a body that is due.
        write_s: without a byte of a reply taken by the client.
        handshake_s: of TLS.
    """

    max_body_bytes: int = 6_553_500
    idle_s: float = 75.0
    header_s: float = 30.0
    body_s: float = 60.0
    write_s: float = 60.0
    handshake_s: float = 10.0


def limits_of(settings: Settings) -> Limits:
    return Limits(
        max_body_bytes=settings.max_request_size,
        idle_s=settings.idle_timeout_seconds,
        header_s=settings.header_timeout_seconds,
        body_s=settings.body_timeout_seconds,
    )


def cors_of(settings: Settings) -> tuple[tuple[str, str], ...]:
    """The CORS headers of every reply; a setting that is missing or empty adds none."""
    named = (
        ("access-control-allow-origin", settings.cors_allowed_origin),
        ("access-control-allow-methods", settings.cors_allowed_methods),
        ("access-control-allow-headers", settings.cors_allowed_headers),
    )
    return tuple([(name, value) for name, value in named if value])


class Phase(Enum):
    """What a connection waits for, and so for how long (`Edge.patience`)."""

    IDLE = "a request"
    HEAD = "the rest of a head"
    BODY = "the rest of a body"
    WORK = "the application's reply"
    FLUSH = "the client to take the reply"
    LINGER = "the client to stop sending, after an early error"
    CLOSING = "the transport to end"


# An enum member is looked up in the class's namespace: too slow for every request.
_IDLE, _HEAD, _BODY, _WORK = Phase.IDLE, Phase.HEAD, Phase.BODY, Phase.WORK
_FLUSH, _LINGER, _CLOSING = Phase.FLUSH, Phase.LINGER, Phase.CLOSING


class Edge:
    """What the connections of one listener share.

    Attributes:
        connections: those that are open.
        is_draining: no new request is taken.
        on_empty: called, while draining, when the last connection is gone.
    """

    def __init__(
        self,
        application: Application,
        limits: Limits,
        *,
        cors: Sequence[tuple[str, str]] = (),
        observer: Observer | None = None,
    ) -> None:
        self.application, self.limits, self.observer = application, limits, observer
        self.heads = Heads(cors)
        self.connections: set[Connection] = set()
        self.is_draining = False
        self.on_empty: Callable[[], None] | None = None
        # Seconds in each phase; what happens then is `Connection._lose_patience`.
        self.patience: Mapping[Phase, float] = {
            Phase.IDLE: limits.idle_s,
            Phase.HEAD: limits.header_s,
            Phase.BODY: limits.body_s,
            Phase.WORK: math.inf,  # the application has its own limits
            Phase.FLUSH: limits.write_s,
            Phase.LINGER: LINGER_S,
            Phase.CLOSING: limits.write_s,
        }

    def sweep(self, now: float) -> None:
        """Ends what waited too long."""
        for connection in tuple(self.connections):
            connection.look_at_clock(now)

    def sweep_interval_s(self) -> float:
        """How often `sweep` is due: the shortest limit, kept within a quarter of its length."""
        return min(1.0, max(0.01, min(self.patience.values()) / 4))

    def drain(self) -> None:
        """From now on no new request is taken; idle connections are closed."""
        self.is_draining = True
        self.patience = {
            **self.patience,
            Phase.IDLE: min(LAST_WORD_S, self.limits.idle_s),
            Phase.LINGER: LAST_WORD_S,
        }
        for connection in tuple(self.connections):
            connection.close_if_idle()

    def abort(self) -> None:
        """Cuts all connections."""
        for connection in tuple(self.connections):
            connection.cut()

    def forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self.is_draining and not self.connections and self.on_empty:
            self.on_empty()


class _Exchange(Exchange):
    __slots__ = ("_connection",)

    def __init__(self, request: Request, connection: Connection | None) -> None:
        self.request = request
        self.on_gone = None
        self._connection = connection

    def reply(self, response: Response) -> None:
        connection = self._connection
        if connection is not None:  # else: answered, or the client has left
            self._connection = None
            connection.answer(self, response)

    def client_left(self) -> None:
        if self._connection is None:
            return
        self._connection = None
        if self.on_gone is not None:
            try:
                self.on_gone()
            except Exception:
                log.exception("error while a request was called off")


class Connection(asyncio.Protocol):
    """One client."""

    __slots__ = (
        "_body",
        "_chunks",
        "_edge",
        "_exchange",
        "_head",
        "_head_at",
        "_inflater",
        "_is_kept",
        "_is_read_paused",
        "_is_taking",
        "_is_write_paused",
        "_left",
        "_max_body",
        "_peer",
        "_phase",
        "_pile",
        "_remembered",
        "_remembered_raw",
        "_since",
        "_transport",
        "_unsent",
    )

    def __init__(self, edge: Edge, peer: str) -> None:
        self._edge, self._peer = edge, peer
        self._max_body = edge.limits.max_body_bytes
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._phase = _IDLE
        self._since = 0.0  # when the phase began, or the last byte that counts for it came
        self._pile = bytearray()  # a head's beginning, or what waits behind the request in work
        self._is_taking = self._is_read_paused = self._is_write_paused = False
        self._unsent = 0  # bytes of replies in the transport's buffer when the sweep last looked

        self._exchange: _Exchange | None = None  # in work
        self._is_kept = True  # the client of the request in work wants to go on
        self._remembered_raw = b""
        self._remembered: Head = cast(Head, None)

        # A body that comes in pieces
        self._head: Head = cast(Head, None)
        self._head_at = 0.0  # when its head was complete; when lingering: since when
        self._body = bytearray()
        self._left = 0  # bytes to come, CHUNKED apart; when lingering: to be thrown away
        self._chunks: Chunks | None = None
        self._inflater: Inflater | None = None

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._since = monotonic()
        self._edge.connections.add(self)

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase is _IDLE and not self._pile:
            self._take(data)
        elif phase is _HEAD:
            self._pile += data
            self._go_on()
        elif phase is _BODY:
            if rest := self._fill(data):
                if self._phase is _IDLE and not self._pile:
                    self._take(rest)
                else:
                    self._put_by(rest)
        elif phase is _LINGER:
            self._throw_away(len(data))
        else:
            self._put_by(data)

    def eof_received(self) -> None:
        # The transport closes itself now. A client that half-closes and still waits looks the
        # same as one that left, and the ones that left are those we meet.
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._pile = bytearray()
        self._body = bytearray()
        self._edge.forget(self)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self._phase is _FLUSH:
            self._phase = _IDLE
            self._since = monotonic()
            self._go_on()

    # Requests

    def _take(self, data: bytes) -> None:
        """Takes requests out of `data` until one is in work or the bytes run out."""
        self._is_taking = True
        at = 0
        size = len(data)
        for _ in range(TURN):
            known = self._remembered_raw
            if known and data.startswith(known, at):
                head = self._remembered
                at += len(known)
            else:
                while data.startswith(b"\r\n", at):  # RFC 9112, section 2.2
                    at += 2
                end = data.find(END, at) + len(END)
                if end < len(END):
                    if at < size:
                        self._begin_head(data[at:])
                        at = size
                    elif self._phase is _HEAD:
                        self._phase = _IDLE  # an empty line was no head
                    break
                raw = data[at:end]
                at = end
                try:
                    head = parse_head(raw)
                except ServeError as error:
                    self._refuse(error, _salvaged(raw))
                    break
                if len(raw) <= REMEMBERED_BYTES:
                    self._remembered_raw, self._remembered = raw, head

            if head.is_plain and head.length <= size - at and head.length <= self._max_body:
                body = data[at : at + head.length]
                at += head.length
                if self._edge.is_draining:
                    self._refuse(ShuttingDown(), head)
                    break
                self._hand_on(head, head.headers.copy(), body, monotonic())
            else:
                self._begin_body(head)
                if self._phase is _BODY:
                    data = self._fill(data[at:])
                    at, size = 0, len(data)
            if self._phase is not _IDLE or at == size:
                break
            if self._transport.is_closing():  # the reply met a reset
                at = size
                break
        self._is_taking = False
        if at < size:
            self._put_by(data[at:])
            if self._phase is _IDLE:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Takes up what was put by."""
        if self._is_taking or self._phase not in (_IDLE, _HEAD):
            return
        if pile := self._pile:
            data = bytes(pile)
            pile.clear()
            self._take(data)
        if self._is_read_paused and len(self._pile) <= PILE_BYTES:
            self._is_read_paused = False
            self._transport.resume_reading()

    def _put_by(self, data: bytes) -> None:
        if self._phase is _LINGER:
            self._throw_away(len(data))
        elif self._phase is not _CLOSING:
            self._pile += data
            if len(self._pile) > PILE_BYTES and not self._is_read_paused:
                self._is_read_paused = True
                self._transport.pause_reading()

    def _begin_head(self, begun: bytes) -> None:
        if self._phase is _IDLE:
            self._phase = _HEAD
            self._since = monotonic()
        try:
            check_begun(begun)
        except ServeError as error:
            self._refuse(error, _salvaged(begun))
        else:
            self._pile += begun

    def _begin_body(self, head: Head) -> None:
        """Gets ready for a body, or refuses it before a byte of it is read."""
        now = monotonic()
        limit = self._max_body
        self._head, self._head_at = head, now
        if head.expectation not in ("", "100-continue"):
            return self._refuse(ExpectationUnknown(head.expectation), head)
        if head.coding and head.coding not in GZIP_NAMES:
            return self._refuse(UnsupportedCoding(head.coding), head)
        if head.length > limit:
            return self._refuse(BodyTooLarge(limit), head)
        if self._edge.is_draining:
            return self._refuse(ShuttingDown(), head)
        self._phase = _BODY
        self._since = now
        self._left = head.length
        self._chunks = Chunks(limit) if head.length == CHUNKED else None
        self._inflater = Inflater(limit) if head.coding and head.length else None
        return None

    def _fill(self, data: bytes) -> bytes:
        """Adds to the body; hands the request on when it is complete.

        Returns:
            what follows the body; b"" while it goes on, and when the request was refused.
        """
        head = self._head
        if not data and head.length:
            if head.expectation and head.http_version != "1.0":
                self._transport.write(_CONTINUE)
            return b""
        self._since = monotonic()
        put = self._body.extend if self._inflater is None else self._inflate
        rest: bytes | None
        try:
            if self._chunks is not None:
                rest = self._chunks.feed(data, put)
                if rest is None:
                    return b""
            else:
                piece = data[: self._left]
                rest = data[self._left :]
                self._left -= len(piece)
                put(piece)
                if self._left:
                    return b""
            if self._inflater is not None:
                self._inflater.finish()
        except ServeError as error:
            self._refuse(error, head)
            return b""
        body = bytes(self._body)
        self._body = bytearray()
        self._chunks = self._inflater = None
        headers = head.headers.copy()
        if head.coding or head.length == CHUNKED:
            headers = with_length(head, len(body))
        self._hand_on(head, headers, body, self._head_at)
        return rest

    def _inflate(self, piece: bytes) -> None:
        assert self._inflater is not None
        self._body += self._inflater.feed(piece)

    def _hand_on(
        self, head: Head, headers: list[tuple[str, str]], body: bytes, received: float
    ) -> None:
        request = self._request(head, headers, body, received)
        exchange = _Exchange(request, self)
        self._exchange = exchange
        self._phase = _WORK
        self._is_kept = head.is_kept
        try:
            self._edge.application(exchange)
        except Exception as error:
            log.exception("error in the application", extra={"path": request.path})
            exchange.reply(problem(error))

    def _request(
        self, head: Head, headers: list[tuple[str, str]], body: bytes, received: float
    ) -> Request:
        return Request(
            head.method,
            head.target,
            head.path,
            head.query,
            headers,
            body,
            http_version=head.http_version,
            peer=self._peer,
            id=fresh_id(),
            received=received,
        )

    # Replies

    def answer(self, exchange: _Exchange, response: Response) -> None:
        """Writes the one reply of the exchange in work."""
        self._exchange = None
        if not self._write(exchange, response, self._is_kept and not self._edge.is_draining):
            if self._pile:  # closing on unread bytes would reset the connection
                self._linger()
            else:
                self._close()
        elif self._is_write_paused:
            self._phase = _FLUSH
            self._since = monotonic()
        else:
            self._phase = _IDLE
            self._since = monotonic()
            if self._pile and not self._is_taking:
                self._go_on()

    def _refuse(self, error: ServeError, head: Head) -> None:
        """Answers a request that the application will not see, and takes no more after it."""
        request = self._request(head, head.headers, b"", monotonic())
        self._write(_Exchange(request, None), problem(error), False)
        self._linger()

    def _write(self, exchange: _Exchange, response: Response, may_keep: bool) -> bool:
        """Writes a reply. Returns whether it promised to keep the connection."""
        edge, request, transport = self._edge, exchange.request, self._transport
        try:
            body = response.body
            is_kept = may_keep and response.status < 400
            head = edge.heads.write(response, request.id, len(body), is_kept)
        except Exception as error:
            if not isinstance(error, Unsendable):
                log.exception("malformed response", extra={"path": request.path})
                error = Unsendable("it is malformed")
            response = problem(PredictionFailed(503, f"The model's reply cannot be sent: {error}."))
            is_kept = False
            body = response.body
            head = edge.heads.write(response, request.id, len(body), is_kept)
        if not body or request.method == "HEAD" or response.status in BODYLESS:
            transport.write(head)
            size = len(head)
        elif len(body) < LARGE_BYTES:
            data = head + body
            transport.write(data)
            size = len(data)
        else:
            transport.write(head)
            transport.write(body)
            size = len(head) + len(body)
        if edge.observer is not None:
            self._tell(exchange, response.status, size)
        return is_kept

    def _tell(self, exchange: _Exchange, status: int, size: int) -> None:
        observer = self._edge.observer
        if observer is None:
            return
        try:
            observer(exchange, status, monotonic() - exchange.request.received, size)
        except Exception:
            log.exception("error in the observer")

    # The end

    def _linger(self) -> None:
        """Says goodbye and reads on for a while, throwing away what comes."""
        self._pile.clear()
        self._body = bytearray()
        self._chunks = self._inflater = None
        self._phase = _LINGER
        self._since = self._head_at = monotonic()
        self._left = LINGER_BYTES
        transport = self._transport
        try:
            if transport.can_write_eof():
                transport.write_eof()
        except (OSError, RuntimeError):  # the client is gone already
            self._close()
            return
        if self._is_read_paused:
            self._is_read_paused = False
            transport.resume_reading()

    def _throw_away(self, size: int) -> None:
        self._since = monotonic()
        self._left -= size
        if self._left < 0:
            self._close()

    def _close(self) -> None:
        """Ends the connection once what was written is on its way."""
        self._phase = _CLOSING
        self._since = monotonic()
        self._transport.close()

    def _leave(self) -> None:
        """The client left."""
        if self._phase is not _CLOSING:
            self._phase = _CLOSING
            self._since = monotonic()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_left()
            self._tell(exchange, CLIENT_LEFT, 0)

    def cut(self) -> None:
        self._transport.abort()

    def close_if_idle(self) -> None:
        if self._phase is _IDLE and not self._pile:
            self._close()

    def look_at_clock(self, now: float) -> None:
        """Ends the wait when it is too long."""
        phase = self._phase
        if phase is _FLUSH or phase is _CLOSING:
            unsent = self._transport.get_write_buffer_size()
            if unsent != self._unsent:  # a slow client, but it takes what we have
                self._unsent, self._since = unsent, now
        if now - self._since >= self._edge.patience[phase]:
            self._lose_patience(phase)
        elif phase is _LINGER and now - self._head_at >= LINGER_ALL_S:
            self._close()

    def _lose_patience(self, phase: Phase) -> None:
        if phase is _HEAD:
            limit = self._edge.limits.header_s
            self._refuse(RequestTimedOut("header", limit), _salvaged(bytes(self._pile)))
        elif phase is _BODY:
            self._refuse(RequestTimedOut("body", self._edge.limits.body_s), self._head)
        elif phase in (_FLUSH, _CLOSING) or self._transport.get_write_buffer_size():
            self.cut()
        else:  # idle or lingering
            self._close()


def _salvaged(raw: bytes) -> Head:
    """As much of a head that was refused as the access log can show."""
    if match := _REQUEST_LINE.match(raw):
        method, target, minor = (part.decode("latin-1") for part in match.groups())
        return Head(method, target, f"1.{minor}")
    return Head("-", "-", "1.1")
