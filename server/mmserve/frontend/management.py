"""Management: list, register, describe, scale, unregister."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any

import msgspec

from mmserve.errors import MethodNotAllowed, ServeError, ShuttingDown
from mmserve.frontend import registration
from mmserve.frontend.forms import media_type
from mmserve.frontend.http import Exchange, Response
from mmserve.frontend.paging import page
from mmserve.frontend.pretty import pretty
from mmserve.frontend.problems import JSON_TYPE, problem
from mmserve.logs.access import shown_target
from mmserve.models.port import Models, Progress, Registration

_log = logging.getLogger(__name__)

#: Starts a coroutine in a task group that outlives the request. Raises RuntimeError once closed.
Spawn = Callable[[Coroutine[Any, Any, None]], object]


class Listed(msgspec.Struct, frozen=True):
    """One model of a list, in the spelling of the wire."""

    modelName: str  # noqa: N815 - the wire's spelling
    modelUrl: str  # noqa: N815


class ModelList(msgspec.Struct, frozen=True):
    """GET /models. The token comes first, and not at all on the last page."""

    nextPageToken: str | msgspec.UnsetType  # noqa: N815 - the wire's spelling
    models: list[Listed]


class Management:
    """The management routes. What may take long runs in a task of `spawn`."""

    def __init__(self, models: Models, spawn: Spawn) -> None:
        self._models, self._spawn = models, spawn

    def serve_models(self, exchange: Exchange) -> None:
        """`/models`. Raises ServeError."""
        match exchange.request.method:
            case "GET":
                self._list(exchange)
            case "POST":
                asked = _asked(exchange)
                self._start(exchange, lambda: self._register(asked))
            case _:
                raise MethodNotAllowed

    def serve_model(self, exchange: Exchange, name: str) -> None:
        """`/models/{name}`. Raises ServeError."""
        match exchange.request.method:
            case "GET":
                exchange.reply(_json(self._models.describe(name)))
            case "PUT":
                least, most, waits = registration.asked_workers(exchange.request.query)
                self._start(exchange, lambda: self._scale(name, least, most, waits))
            case "DELETE":
                self._start(exchange, lambda: self._unregister(name))
            case _:
                raise MethodNotAllowed

    def _list(self, exchange: Exchange) -> None:
        limit, start = registration.asked_page(exchange.request.query)
        models, token = page(self._models.names(), limit=limit, start=start)
        listed = [Listed(name, url) for name, url in models]
        exchange.reply(_json(ModelList(token or msgspec.UNSET, listed)))

    async def _register(self, asked: Registration) -> Response:
        name, progress = await self._models.register(asked)
        if progress is Progress.REGISTERED:
            return _status(f'Model "{name}" registered')
        return _progressed(progress)

    async def _scale(self, name: str, least: int, most: int, waits: bool) -> Response:
        progress = await self._models.scale(
            name, min_workers=least, max_workers=most, synchronous=waits
        )
        return _progressed(progress)

    async def _unregister(self, name: str) -> Response:
        await self._models.unregister(name)
        return _status(f'Model "{name}" unregistered')

    def _start(self, exchange: Exchange, act: Callable[[], Awaitable[Response]]) -> None:
        """Acts in a task, also when the client leaves meanwhile: what was asked for is done."""
        answering = _answer(exchange, act)
        try:
            self._spawn(answering)
        except RuntimeError:  # the task group is closed
            answering.close()
            raise ShuttingDown from None


async def _answer(exchange: Exchange, act: Callable[[], Awaitable[Response]]) -> None:
    try:
        reply = await act()
    except ServeError as error:
        reply = problem(error)
    except asyncio.CancelledError:
        exchange.reply(problem(ShuttingDown()))
        raise
    except Exception as error:
        _log.exception(
            "management request failed", extra={"target": shown_target(exchange.request.target)}
        )
        reply = problem(error)
    exchange.reply(reply)


def _asked(exchange: Exchange) -> Registration:
    """The body alone where it says it is JSON, else the query alone. Raises BadRequest."""
    request = exchange.request
    if media_type(request.header("content-type") or "") == "application/json":
        return registration.asked_by_json(request.body)
    return registration.asked_by_query(request.query)


def _progressed(progress: Progress) -> Response:
    match progress:
        case Progress.STARTED:
            return _status("Processing worker updates...", HTTPStatus.ACCEPTED)
        case Progress.PARTIAL:
            return _status("Workers scaling in progress...", 210, "Partial Success")
        case _:
            return _status("Workers scaled")


def _status(text: str, status: int = HTTPStatus.OK, reason: str | None = None) -> Response:
    return Response(status, pretty({"status": text}), (JSON_TYPE,), reason)


def _json(value: Any) -> Response:
    return Response(HTTPStatus.OK, pretty(value), (JSON_TYPE,))
