"""What can go wrong, in words. Nothing here knows HTTP; `frontend/problems.py` does."""


class ServeError(Exception):
    """Base of all that a client may be told about. `str(error)` is the message it gets."""


# The request itself


class BadRequest(ServeError):
    """The client's mistake; the message says what to send instead."""


class BodyTooLarge(ServeError):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"The request body is larger than {limit_bytes} bytes; max_request_size sets the limit."
        )
        self.limit_bytes = limit_bytes


class UnsupportedCoding(ServeError):
    def __init__(self, coding: str) -> None:
        super().__init__(f"Content-Encoding {coding!r} is not supported; send gzip or identity.")
        self.coding = coding


class ExpectationUnknown(ServeError):
    def __init__(self, expectation: str) -> None:
        super().__init__(f"Expect: {expectation!r} is not supported; only 100-continue is.")


class RequestTimedOut(ServeError):
    """The client took too long to send its request."""

    def __init__(self, part: str, limit_s: float) -> None:
        super().__init__(
            f"The {part} of the request did not arrive within {limit_s:g} s; "
            f"{part}_timeout_seconds sets the limit."
        )


class RouteNotFound(ServeError):
    def __init__(self) -> None:
        super().__init__("Requested resource is not found, please refer to the API document.")


class MethodNotAllowed(ServeError):
    def __init__(self) -> None:
        super().__init__("Requested method is not allowed, please refer to the API document.")


class Forbidden(ServeError):
    """A browser page of somebody else, or a rebound host name, asked for management."""


class Unauthorized(ServeError):
    """`management_token_file` is set and the bearer token is missing or wrong."""


# Models and archives


class ModelNotFound(ServeError):
    def __init__(self, name: str) -> None:
        super().__init__(f"Model not found: {name}")
        self.name = name


class SourceNotFound(ServeError):
    """The `url` of a registration leads nowhere that may be read (404, as Multi Model Server)."""


class DownloadFailed(ServeError):
    """The remote end of a download is at fault."""

    def __init__(self, url: str, *, code: int | None = None, reason: str | None = None) -> None:
        tail = f", code: {code}" if code is not None else ""
        tail += f" ({reason})" if reason else ""
        super().__init__(f"Failed to download model from: {url}{tail}")


class InvalidModel(ServeError):
    """The archive, its manifest or its layout is wrong."""


class StorageFailed(ServeError):
    """Our own disk or permissions are at fault; the message has path and errno."""


class ModelExists(ServeError):
    def __init__(self, name: str) -> None:
        super().__init__(f"Model {name} is already registered.")
        self.name = name


class UnregisterTimedOut(ServeError):
    def __init__(self, name: str) -> None:
        super().__init__(f"Timed out while cleaning resources: {name}")
        self.name = name


# Workers


class WorkersFailed(ServeError):
    """Workers of a model did not come up. `out_of_memory` decides 507 or 500.

    `trace` is the model's own traceback, for the log and nobody else.
    """

    def __init__(self, cause: str = "", *, out_of_memory: bool = False, trace: str = "") -> None:
        super().__init__("Failed to start workers" + (f": {cause}" if cause else ""))
        self.cause, self.out_of_memory, self.trace = cause, out_of_memory, trace


class WorkerDied(ServeError):
    """The worker ended, or was ended, while it had the request."""

    def __init__(self, cause: str = "", *, out_of_memory: bool = False) -> None:
        super().__init__("Worker died." + (f" {cause}" if cause else ""))
        self.cause, self.out_of_memory = cause, out_of_memory


class ResponseTooLarge(ServeError):
    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"The model's response of {size_bytes} bytes is larger than {limit_bytes} bytes; "
            "max_response_size sets the limit."
        )


class PredictionFailed(ServeError):
    """The handler failed, or returned what cannot be sent; `status` is what the client gets."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unavailable(ServeError):
    """The model cannot take the request now; it may later. Base of the 503 family."""

    #: Seconds after which another try makes sense (`Retry-After`).
    retry_after_s: int = 1


class NoWorker(Unavailable):
    def __init__(self, model: str, why: str = "It has no workers; scale it up") -> None:
        super().__init__(f"No worker is available to serve request for model: {model}. {why}.")
        self.model = model


class QueueFull(Unavailable):
    def __init__(self, model: str, capacity: int) -> None:
        super().__init__(
            f"No worker is available to serve request for model: {model}. "
            f"The queue is full: {capacity} requests already wait; job_queue_size sets the limit."
        )
        self.model, self.capacity = model, capacity


class WaitedTooLong(Unavailable):
    def __init__(self, model: str, limit_s: float) -> None:
        super().__init__(
            f"No worker is available to serve request for model: {model}. "
            f"It waited {limit_s:g} s in the queue; max_queue_wait_seconds sets the limit."
        )


class ModelGone(Unavailable):
    """The model was unregistered while the request waited."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"No worker is available to serve request for model: {model}. It was unregistered."
        )


class ShuttingDown(Unavailable):
    def __init__(self) -> None:
        super().__init__("The server is stopping; send the request to another instance.")


# Start


class ConfigurationError(ServeError):
    """A setting is wrong; the message names the key, the value and what is allowed."""
