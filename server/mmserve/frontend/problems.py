"""What an error is on the wire: the one place that knows both our errors and HTTP.

The body is Multi Model Server's: `{"code": …, "type": "…", "message": "…"}`, where `type` is the
name of the Java class that its clients compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TypeVar

from mmserve import errors
from mmserve.errors import ServeError
from mmserve.frontend.http import Headers, Response
from mmserve.frontend.pretty import text_literal

V = TypeVar("V")

STATUS: Mapping[type[ServeError], HTTPStatus] = {
    ServeError: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.BadRequest: HTTPStatus.BAD_REQUEST,
    errors.BodyTooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    errors.UnsupportedCoding: HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    errors.ExpectationUnknown: HTTPStatus.EXPECTATION_FAILED,
    errors.RequestTimedOut: HTTPStatus.REQUEST_TIMEOUT,
    errors.RouteNotFound: HTTPStatus.NOT_FOUND,
    errors.MethodNotAllowed: HTTPStatus.METHOD_NOT_ALLOWED,
    errors.Forbidden: HTTPStatus.FORBIDDEN,
    errors.Unauthorized: HTTPStatus.UNAUTHORIZED,
    errors.ModelNotFound: HTTPStatus.NOT_FOUND,
    errors.SourceNotFound: HTTPStatus.NOT_FOUND,
    errors.DownloadFailed: HTTPStatus.BAD_REQUEST,
    errors.InvalidModel: HTTPStatus.BAD_REQUEST,
    errors.StorageFailed: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.ModelExists: HTTPStatus.CONFLICT,
    errors.UnregisterTimedOut: HTTPStatus.REQUEST_TIMEOUT,
    errors.WorkersFailed: HTTPStatus.INTERNAL_SERVER_ERROR,  # 507 when memory was the cause
    errors.WorkerDied: HTTPStatus.INTERNAL_SERVER_ERROR,  # 507 when memory was the cause
    errors.ResponseTooLarge: HTTPStatus.INTERNAL_SERVER_ERROR,
    errors.PredictionFailed: HTTPStatus.SERVICE_UNAVAILABLE,  # its own `status`, in truth
    errors.Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.NoWorker: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.QueueFull: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.WaitedTooLong: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ModelGone: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ShuttingDown: HTTPStatus.SERVICE_UNAVAILABLE,
    errors.ConfigurationError: HTTPStatus.INTERNAL_SERVER_ERROR,
}

#: `type` of the body. A class that is not named here has that of its nearest base class.
TYPE: Mapping[type[ServeError], str] = {
    ServeError: "InternalServerException",
    errors.BadRequest: "BadRequestException",
    errors.BodyTooLarge: "RequestTooLargeException",
    errors.UnsupportedCoding: "UnsupportedMediaTypeException",
    errors.ExpectationUnknown: "ExpectationFailedException",
    errors.RequestTimedOut: "RequestTimeoutException",
    errors.RouteNotFound: "ResourceNotFoundException",
    errors.MethodNotAllowed: "MethodNotAllowedException",
    errors.Forbidden: "ForbiddenException",
    errors.Unauthorized: "UnauthorizedException",
    errors.ModelNotFound: "ModelNotFoundException",
    errors.SourceNotFound: "ModelNotFoundException",
    errors.DownloadFailed: "DownloadModelException",
    errors.InvalidModel: "InvalidModelException",
    errors.ModelExists: "ConflictStatusException",
    errors.UnregisterTimedOut: "RequestTimeoutException",
    errors.Unavailable: "ServiceUnavailableException",
}

#: Statuses a reply may end with. 1xx is an interim reply: the client would wait for another.
SENDABLE = range(200, 1000)

JSON_TYPE = ("content-type", "application/json")
_JSON_ONLY: Headers = (JSON_TYPE,)
_CONSTANT = (errors.RouteNotFound, errors.MethodNotAllowed, errors.ShuttingDown)


def problem(error: Exception, headers: Headers = ()) -> Response:
    """The reply that tells a client of an error.

    The edge must not change it: those without a variable part are made once and shared.

    Args:
        error: a ServeError; of any other exception the client learns nothing but 500.
        headers: more headers of this reply.
    """
    kind = type(error)
    if not headers and (ready := _ready.get(kind)) is not None:
        return ready
    return _make(error, headers)


def status_of(error: ServeError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, errors.PredictionFailed):
        return error.status if error.status in SENDABLE else HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, errors.WorkersFailed | errors.WorkerDied) and error.out_of_memory:
        return HTTPStatus.INSUFFICIENT_STORAGE
    return _nearest(STATUS, type(error))


def type_of(error: ServeError) -> str:
    """The `type` of an error, a Java class name."""
    return _nearest(TYPE, type(error))


def _nearest(table: Mapping[type[ServeError], V], kind: type[ServeError]) -> V:
    for base in kind.__mro__:
        if base in table:
            return table[base]
    raise KeyError(kind)


def _make(error: Exception, headers: Headers) -> Response:
    if not isinstance(error, ServeError):
        error = ServeError("Internal error; the server's log says more.")
    status = status_of(error)
    message = str(error)
    body = b'{\n  "code": %d,\n  "type": "%s"' % (status, type_of(error).encode())
    if message or isinstance(error, errors.PredictionFailed):  # a handler's word, be it empty
        body += b',\n  "message": ' + text_literal(message)
    body += b"\n}\n"
    all_headers = _JSON_ONLY
    if isinstance(error, errors.Unavailable):
        all_headers = (JSON_TYPE, ("retry-after", str(error.retry_after_s)))
    elif isinstance(error, errors.Unauthorized):
        all_headers = (JSON_TYPE, ("www-authenticate", 'Bearer realm="management"'))
    return Response(status, body, (*all_headers, *headers))


_ready: Mapping[type[Exception], Response] = {kind: _make(kind(), ()) for kind in _CONSTANT}
