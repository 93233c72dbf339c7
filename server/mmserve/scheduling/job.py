"""A job: one request on its way to a worker and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmserve.errors import ServeError
from mmserve.wire.messages import Parameter


class Result:
    """What a handler answered to one request.

    Attributes:
        status: the handler's, 200 where it said nothing.
        phrase: reason phrase, or None for the standard one.
        headers: (name, value), in the handler's order.
        body: bytes-like.
        is_json: the body was encoded as JSON by the worker from something that is not text.
        queue_s: seconds between its arrival in the queue and its way to the worker.
        handler_s: seconds in the handler, of the whole batch.
    """

    __slots__ = ("body", "handler_s", "headers", "is_json", "phrase", "queue_s", "status")

    def __init__(
        self,
        status: int,
        phrase: str | None,
        headers: Sequence[tuple[str, str]],
        body: bytes | memoryview,
        is_json: bool = False,
    ) -> None:
        self.status, self.phrase, self.headers = status, phrase, headers
        self.body, self.is_json = body, is_json
        self.queue_s: float | None = None
        self.handler_s: float | None = None


#: Called once, in the event loop's thread, with the result or the reason why there is none.
Deliver = Callable[[Result | ServeError], None]


class Job:
    """One request to one model.

    Attributes:
        request_id: `x-request-id` of the request.
        headers: request headers, (name, value) as the client sent them.
        parameters: what the handler sees as one dict of its `data`, in order; the last of a
            name wins.
        deliver: gets the outcome, unless the job was cancelled.
        is_cancelled: nobody waits any more; it is dropped if it has not started.
        put_at: `time.monotonic()` when it entered the queue; set by the queue.
    """

    __slots__ = ("deliver", "headers", "is_cancelled", "parameters", "put_at", "request_id")

    def __init__(
        self,
        request_id: str,
        headers: list[tuple[str, str]],
        parameters: list[tuple[Parameter, bytes | memoryview]],
        deliver: Deliver,
    ) -> None:
        self.request_id, self.headers, self.parameters = request_id, headers, parameters
        self.deliver = deliver
        self.is_cancelled = False
        self.put_at = 0.0
