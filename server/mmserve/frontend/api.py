"""The REST API: three applications, for a listener with inference, management or both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus

from mmserve.config.settings import Settings
from mmserve.errors import MethodNotAllowed, RouteNotFound, ServeError
from mmserve.frontend.edge import cors_of
from mmserve.frontend.guard import Guard, is_preflight
from mmserve.frontend.http import Application, Exchange, Response
from mmserve.frontend.inference import Inference
from mmserve.frontend.management import Management, Spawn
from mmserve.frontend.openapi import (
    inference_description,
    management_description,
    shared_description,
)
from mmserve.frontend.problems import JSON_TYPE, problem
from mmserve.frontend.routes import INFERENCE, MANAGEMENT, Route, route_of
from mmserve.logs.access import shown_target
from mmserve.models.port import Models

_log = logging.getLogger(__name__)

_PREDICTIONS = "/predictions/"
_MODELS, _INVOKE = "/models/", "/invoke"


class Api:
    """What the listeners serve.

    Args:
        settings: of the server.
        models: the house that keeps the models.
        spawn: starts a coroutine of management in a task group that outlives the request.
            Predictions start no task.

    Attributes:
        inference: for a listener of its own.
        management: for a listener of its own; `Guard` stands before every route of it.
        shared: for one listener with both; `Guard` stands before the management routes.

    Raises:
        ConfigurationError: `management_token_file` cannot be read.
    """

    def __init__(self, settings: Settings, models: Models, spawn: Spawn) -> None:
        self._inference = Inference(
            models, ping_mode=settings.ping_mode, server_timing=settings.server_timing
        )
        self._management = Management(models, spawn)
        self._guard = Guard(
            settings.management, settings.cors_allowed_origin, settings.management_token_file
        )
        self._has_cors = bool(cors_of(settings))
        self.inference: Application = _door(self._serve_inference)
        self.management: Application = _door(self._serve_management)
        self.shared: Application = _door(self._serve_shared)

    def _serve_inference(self, exchange: Exchange) -> None:
        if self._has_predicted(exchange):
            return
        if self._has_answered_preflight(exchange):
            return
        route, name = route_of(exchange.request.path)
        if route in INFERENCE:
            self._serve_inference_route(exchange, route, name)
        else:
            _serve_common(exchange, route, inference_description)

    def _serve_management(self, exchange: Exchange) -> None:
        self._guard.check_origin(exchange.request)
        if self._has_answered_preflight(exchange):
            return
        self._guard.check_token(exchange.request)
        route, name = route_of(exchange.request.path)
        if route in MANAGEMENT:
            self._serve_management_route(exchange, route, name)
        else:
            _serve_common(exchange, route, management_description)

    def _serve_shared(self, exchange: Exchange) -> None:
        if self._has_predicted(exchange):
            return
        route, name = route_of(exchange.request.path)
        if route in MANAGEMENT:
            self._guard.check_origin(exchange.request)
        if self._has_answered_preflight(exchange):
            return
        if route in MANAGEMENT:
            self._guard.check_token(exchange.request)
            self._serve_management_route(exchange, route, name)
        elif route in INFERENCE:
            self._serve_inference_route(exchange, route, name)
        else:
            _serve_common(exchange, route, shared_description)

    def _has_predicted(self, exchange: Exchange) -> bool:
        """Recognises the usual predictions by plain comparisons, ahead of `route_of`."""
        request = exchange.request
        path = request.path
        if request.method == "OPTIONS" or "%" in path:
            return False
        if path.startswith(_PREDICTIONS):
            name = path[len(_PREDICTIONS) :]
            query = ""  # kept from the handler, as by Multi Model Server
        elif path == "/invocations":
            self._inference.invoke(exchange)
            return True
        elif path.startswith(_MODELS) and path.endswith(_INVOKE):
            name = path[len(_MODELS) : -len(_INVOKE)]
            query = request.query
        else:
            return False
        if not name or "/" in name:
            return False
        self._inference.predict(exchange, name, query)
        return True

    def _has_answered_preflight(self, exchange: Exchange) -> bool:
        # Without CORS keys an OPTIONS request keeps Multi Model Server's meaning, whoever sends it.
        if not self._has_cors or not is_preflight(exchange.request):
            return False
        exchange.reply(Response(HTTPStatus.OK))  # the edge adds the CORS headers
        return True

    def _serve_inference_route(self, exchange: Exchange, route: Route, name: str) -> None:
        request = exchange.request
        is_options = request.method == "OPTIONS"
        match route:
            case Route.PING:
                self._inference.ping(exchange)
            case Route.INVOCATIONS if is_options:
                self._inference.describe_invoked(exchange)
            case Route.INVOCATIONS:
                self._inference.invoke(exchange)
            case _ if is_options:
                self._inference.describe(exchange, name)
            case Route.PREDICT:
                self._inference.predict(exchange, name, "")
            case _:
                self._inference.predict(exchange, name, request.query)

    def _serve_management_route(self, exchange: Exchange, route: Route, name: str) -> None:
        if route is Route.MODELS:
            self._management.serve_models(exchange)
        else:
            self._management.serve_model(exchange, name)


def _serve_common(exchange: Exchange, route: Route, description: Callable[[], bytes]) -> None:
    """What every listener has, and what none has."""
    is_options = exchange.request.method == "OPTIONS"
    match route:
        case Route.DESCRIPTION:
            exchange.reply(Response(HTTPStatus.OK, description(), (JSON_TYPE,)))
        case Route.ROOT if is_options:
            exchange.reply(Response(HTTPStatus.OK, description(), (JSON_TYPE,)))
        case Route.ROOT | Route.NO_METHOD:
            raise MethodNotAllowed
        case _:
            raise RouteNotFound


def _door(serve: Callable[[Exchange], None]) -> Application:
    """Answers what `serve` raises: errors of ours in words, others as 500, with a log line."""

    def application(exchange: Exchange) -> None:
        try:
            serve(exchange)
        except ServeError as error:
            exchange.reply(problem(error))
        except Exception as error:
            _log.exception(
                "request failed", extra={"target": shown_target(exchange.request.target)}
            )
            exchange.reply(problem(error))

    return application
