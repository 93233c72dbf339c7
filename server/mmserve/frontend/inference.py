"""Predictions and pings: from a request to a job, from its outcome to a reply.

A prediction makes no task: the job carries the callback that answers it.
"""

from __future__ import annotations

import time
from http import HTTPStatus

from mmserve.errors import BadRequest, ModelNotFound, PredictionFailed, ServeError
from mmserve.frontend.forms import (
    Parameters,
    as_parameters,
    body_parameters,
    query_pairs,
)
from mmserve.frontend.http import Exchange, Request, Response
from mmserve.frontend.openapi import model_description
from mmserve.frontend.pretty import pretty
from mmserve.frontend.problems import JSON_TYPE, SENDABLE, problem
from mmserve.models.port import Models
from mmserve.scheduling.job import Job, Result
from mmserve.wire.messages import Parameter


class Inference:
    """The inference routes.

    Args:
        models: takes the jobs.
        ping_mode: `ready` answers 503 while a model of the start is missing or has no worker that
            is ready, or no worker is left at all; any other always 200, as Multi Model Server
            does: the front lives, whatever the text says.
        server_timing: whether replies carry `Server-Timing`.
    """

    def __init__(self, models: Models, *, ping_mode: str, server_timing: bool) -> None:
        self._models = models
        self._submit = models.submit
        self._is_strict = ping_mode == "ready"
        self._server_timing = server_timing
        self._pings: dict[tuple[str, bool], Response] = {}

    def predict(self, exchange: Exchange, name: str, query: str) -> None:
        """Asks one model.

        Args:
            name: of the model.
            query: the raw query of a route whose query parameters reach the handler, else "".

        Raises:
            ServeError: the job was not taken.
        """
        parameters = as_parameters(query_pairs(query)) if query else []
        self._ask(exchange, name, parameters + _body(exchange.request))

    def invoke(self, exchange: Exchange) -> None:
        """Asks the model that the request names: in the query, else in a form field, else the only
        one loaded at start.

        Raises:
            ServeError: the job was not taken.
        """
        request = exchange.request
        pairs = query_pairs(request.query)
        from_body = _body(request)
        name = self._named(pairs, from_body)
        self._ask(exchange, name, as_parameters(pairs) + from_body)

    def describe(self, exchange: Exchange, name: str) -> None:
        """Describes the API of one model. Raises ModelNotFound."""
        if not self._models.has(name):
            raise ModelNotFound(name)
        exchange.reply(Response(HTTPStatus.OK, model_description(name), (JSON_TYPE,)))

    def describe_invoked(self, exchange: Exchange) -> None:
        """As `describe`, for the model that `invoke` would ask. Raises ServeError."""
        self.describe(exchange, self._named(query_pairs(exchange.request.query), []))

    def ping(self, exchange: Exchange) -> None:
        """Tells how the models are."""
        health = self._models.health()
        is_bad = self._is_strict and (health == "Unhealthy" or not self._has_loaded())
        if is_bad and health == "Healthy":  # to which a worker that loads is as good as one
            health = "Unhealthy"
        reply = self._pings.get((health, is_bad))
        if reply is None:
            status = HTTPStatus.SERVICE_UNAVAILABLE if is_bad else HTTPStatus.OK
            reply = Response(status, pretty({"status": health}), (JSON_TYPE,))
            self._pings[health, is_bad] = reply
        exchange.reply(reply)

    def _has_loaded(self) -> bool:
        """Whether each model of the start is there, with a ready worker if it wants any."""
        return not self._models.missing_at_start() and all(
            any(worker.status == "READY" for worker in model.workers)
            for model in (self._models.describe(name) for name, _ in self._models.names())
            if model.loadedAtStartup and model.minWorkers
        )

    def _named(self, pairs: list[tuple[str, bytes]], from_body: Parameters) -> str:
        for key, value in pairs:
            if key == "model_name":
                if value:
                    return value.decode(errors="replace")
                break  # the first counts; empty is as if missing
        sole = self._models.sole_startup_model()
        for parameter, field in reversed(from_body):
            if parameter.name == "model_name" and parameter.content_type is None:
                # Multi Model Server describes this field but does not heed it: what its clients
                # send there goes to the one model of the start, whatever it says.
                name = bytes(field).decode(errors="replace")
                if name and (sole is None or self._models.has(name)):
                    return name
                break
        if sole is None:
            raise BadRequest("Parameter model_name is required.")
        return sole

    def _ask(self, exchange: Exchange, name: str, parameters: Parameters) -> None:
        request = exchange.request

        def deliver(outcome: Result | ServeError) -> None:
            exchange.on_gone = None  # breaks the circle exchange, job, exchange
            reply = reply_to(outcome)
            if self._server_timing:
                reply = _timed(reply, outcome, time.monotonic() - request.received)
            exchange.reply(reply)

        def cancel() -> None:
            exchange.on_gone = None
            job.is_cancelled = True

        job = Job(request.id, request.headers, parameters, deliver)
        exchange.on_gone = cancel
        try:
            self._submit(name, job)
        except BaseException:
            exchange.on_gone = None
            raise


def reply_to(outcome: Result | ServeError) -> Response:
    """The reply that carries what a handler answered, or says why it did not."""
    if not isinstance(outcome, Result):
        if isinstance(outcome, PredictionFailed) and outcome.status == HTTPStatus.OK:
            # A PredictionException of code 200 is a success with this body to MMS's clients.
            return Response(HTTPStatus.OK, b"error")
        return problem(outcome)
    status = outcome.status
    if status not in SENDABLE:
        return problem(PredictionFailed(503, f"The handler set the status {status}."))
    headers = outcome.headers
    if outcome.is_json and not any(key.lower() == "content-type" for key, _ in headers):
        headers = (*headers, JSON_TYPE)
    # "Reset Content" has a length, which is zero (RFC 9110, section 15.3.6).
    body = b"" if status == HTTPStatus.RESET_CONTENT else outcome.body
    return Response(status, body, headers, outcome.phrase or None)


def _body(request: Request) -> Parameters:
    """What the handler sees of the body. Raises BadRequest."""
    content_type = ""
    for key, value in request.headers:
        if len(key) == 12 and key.lower() == "content-type":
            content_type = value
    body = request.body
    if "form" in content_type.lower():  # both kinds of form have it in their name
        return body_parameters(content_type, body)
    return [(Parameter("body", len(body), content_type), body)]


def _timed(reply: Response, outcome: Result | ServeError, total_s: float) -> Response:
    """The reply with `Server-Timing`, whose durations are milliseconds."""
    spans: list[tuple[str, float | None]] = [("total", total_s)]
    if isinstance(outcome, Result):
        spans = [("queue", outcome.queue_s), ("handler", outcome.handler_s), *spans]
    text = ", ".join(f"{name};dur={s * 1000:.3f}" for name, s in spans if s is not None)
    return Response(
        reply.status, reply.body, (*reply.headers, ("server-timing", text)), reply.reason
    )
