"""The frontend's own view of HTTP: what every room above the edge sees of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Headers = Sequence[tuple[str, str]]


class Request:
    """One complete request.

    Attributes:
        method: as sent, upper case.
        target: raw request target, path and query, as the access log shows it.
        path: raw path, percent-encoded as it came.
        query: raw query without the question mark; "" when there is none.
        http_version: "1.1" or "1.0".
        headers: (name, value) in the order and letter case of the client.
        body: the whole body, de-chunked and, where the client compressed it, inflated.
        peer: "127.0.0.1:54321", "[::1]:54321"; "0.0.0.0" on a unix socket, as MMS logs it.
        id: what `x-request-id` will say.
        received: `time.monotonic()` when the head was complete.
    """

    __slots__ = (
        "body",
        "headers",
        "http_version",
        "id",
        "method",
        "path",
        "peer",
        "query",
        "received",
        "target",
    )

    def __init__(
        self,
        method: str,
        target: str,
        path: str,
        query: str,
        headers: list[tuple[str, str]],
        body: bytes,
        *,
        http_version: str = "1.1",
        peer: str = "0.0.0.0",
        id: str = "",
        received: float = 0.0,
    ) -> None:
        self.method, self.target, self.path, self.query = method, target, path, query
        self.headers, self.body, self.http_version = headers, body, http_version
        self.peer, self.id, self.received = peer, id, received

    def header(self, name: str) -> str | None:
        """The last value of a header, whatever its letter case; None where it is missing."""
        name = name.lower()
        for key, value in reversed(self.headers):
            if key.lower() == name:
                return value
        return None


class Response:
    """One reply, before the edge adds what every reply carries.

    The edge adds `x-request-id`, `Pragma`, `Cache-Control`, `Expires`, `content-length`,
    `connection` and the CORS headers; those in `headers` that the edge owns are replaced.

    Attributes:
        status: 100–999.
        body: bytes-like.
        headers: (name, value) of this reply only.
        reason: reason phrase; None for the standard one.
    """

    __slots__ = ("body", "headers", "reason", "status")

    def __init__(
        self,
        status: int,
        body: bytes | memoryview = b"",
        headers: Headers = (),
        reason: str | None = None,
    ) -> None:
        self.status, self.body, self.headers, self.reason = status, body, headers, reason


class Exchange:
    """A request and the one reply it gets.

    The application is called with it and calls `reply` exactly once, then or later, in the event
    loop's thread. When the client leaves first, `on_gone` is called (once) and a later `reply` is
    dropped.
    """

    __slots__ = ("on_gone", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.on_gone: Callable[[], None] | None = None

    def reply(self, response: Response) -> None:
        raise NotImplementedError


#: What a listener serves. It may answer at once or later; it never blocks and never raises.
Application = Callable[[Exchange], None]
