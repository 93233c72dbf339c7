"""The access log: which requests are in it, and their line."""

from __future__ import annotations

import re
from time import time
from typing import Protocol
from urllib.parse import quote, unquote

from mmserve.config.report import mask_urls
from mmserve.config.settings import Settings
from mmserve.logs.escape import escaped
from mmserve.logs.journal import Journal

#: Least status that `access_log` keeps.
_FROM_STATUS = {"all": 0, "no-ping": 0, "errors": 400, "off": 1000}


#: Between the parameters of a query; kept by `split`.
_SEPARATOR = re.compile("([&;])")


class _Request(Protocol):
    @property
    def method(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def http_version(self) -> str: ...
    @property
    def peer(self) -> str: ...
    @property
    def id(self) -> str: ...
    def header(self, name: str) -> str | None: ...


class _Exchange(Protocol):
    @property
    def request(self) -> _Request: ...


class _Counters(Protocol):
    """`metrics.requests.RequestCounters`."""

    def line(self, status: int, now: float) -> str: ...


def access_line(
    peer: str, method: str, target: str, version: str, status: int, elapsed_s: float
) -> str:
    """`/127.0.0.1:50000 "POST /predictions/m HTTP/1.1" 200 5`, the last being milliseconds.

    Args:
        peer: address and port; `0.0.0.0` on a unix socket, which Multi Model Server shows without
            the slash (`AccessLogger`, 1.1.11).
        target: path and query, as `shown_target` has them. Control characters, and the quote that
            would end the field, are escaped.
        version: "1.1" or "1.0".
    """
    target = shown_target(target)
    if not target.isprintable() or '"' in target:
        target = escaped(target.replace("\\", "\\\\").replace('"', '\\"'))
    slash = "" if peer == "0.0.0.0" else "/"
    return f'{slash}{peer} "{method} {target} HTTP/{version}" {status} {int(elapsed_s * 1000)}'


def shown_target(target: str) -> str:
    """A target for the log: the URL that a registration names has its secrets masked.

    Such a URL may be presigned: whoever reads the log could fetch what it leads to.
    """
    if not target.startswith("/models"):
        return target
    path, mark, query = target.partition("?")
    if not mark or path.rstrip("/") != "/models":
        return target
    return path + mark + "".join(map(_shown_parameter, _SEPARATOR.split(query)))


def _shown_parameter(pair: str) -> str:
    name, equals, value = pair.partition("=")
    if unquote(name) not in ("url", "model_url"):
        return pair
    text = unquote(value)
    masked = mask_urls(text)
    return pair if masked == text else name + equals + quote(masked, safe="/:?*@")


class RequestLog:
    """Told of every reply: writes the access line and the request counter.

    `access_log` decides what is left out: `no-ping` the health checks that went well, `errors` all
    below status 400, `off` everything. The counters have every reply.
    """

    def __init__(self, journal: Journal, settings: Settings, counters: _Counters) -> None:
        kept: str = settings.access_log if journal.keeps_access else "off"
        self._write = journal.request
        self._count = counters.line
        self._is_json = journal.is_json
        #: Least status of a line, and of the line of a ping.
        self._from = _FROM_STATUS[kept]
        self._ping_from = _FROM_STATUS["errors"] if kept == "no-ping" else self._from

    def observe(
        self, exchange: _Exchange, status: int, elapsed_s: float, bytes_out: int = 0
    ) -> None:
        """A reply was sent.

        Args:
            elapsed_s: from the request's head to the reply.
            bytes_out: of the reply, head and body.
        """
        now = time()
        counter = self._count(status, now)
        request = exchange.request
        if status < self._from or (status < self._ping_from and request.path == "/ping"):
            self._write(now, None, counter)
            return
        text = access_line(
            request.peer, request.method, request.target, request.http_version, status, elapsed_s
        )
        if not self._is_json:
            self._write(now, text, counter)
            return
        fields = {
            "request_id": request.id,
            "peer": request.peer,
            "method": request.method,
            "target": shown_target(request.target),
            "status": status,
            "duration_ms": round(elapsed_s * 1000, 3),
            "bytes_out": bytes_out,
        }
        if trace := request.header("traceparent"):
            fields["traceparent"] = trace
        self._write(now, text, counter, fields)
