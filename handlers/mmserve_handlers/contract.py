"""What the server hands to a handler and takes back, as our handlers use it.

One call brings a batch: a list with one dict per request. One list with one answer per request
goes back. A request that cannot be served is answered alone, with a status of its own, so that
the others of its batch do not pay for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

#: One request: parameter name → value, decoded by its media type or not at all.
Item = Mapping[str, Any]

#: Where the payload is looked for, in this order: the whole body, then the usual form fields.
PAYLOAD_KEYS = ("body", "data", "file")

#: What `curl -d` says of whatever it sends, unless it is told otherwise.
FORM_TYPE = "application/x-www-form-urlencoded"


class Context(Protocol):
    """The part of the handler context that is used here."""

    model_name: str
    system_properties: Mapping[str, Any]

    def get_request_header(self, idx: int, key: str) -> Any: ...

    def set_response_content_type(self, idx: int, value: str) -> None: ...

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None: ...


class Refused(ValueError):
    """A request that is answered alone, with an error of its own; the message is for the client."""

    status, phrase, kind = 500, "Internal Server Error", "InternalServerException"


class BadInput(Refused):
    """The client's mistake; the message names the field and what to send instead."""

    status, phrase, kind = 400, "Bad Request", "BadRequestException"

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


class TooLarge(BadInput):
    """What was sent is well formed, and more than is taken."""

    status, phrase, kind = 413, "Request Entity Too Large", "RequestTooLargeException"


class BadOutput(Refused):
    """What the model answered cannot be told to anybody; the request may have been a good one."""


def payload(item: Item, content_type: object = None) -> Any:
    """The value of a request that carries its data, as it came.

    A form with one field of any name is taken too.

    Args:
        item: the request.
        content_type: its header, for the message where there is no data.

    Raises:
        BadInput: there is none, it is empty, or there are several that could be meant.
    """
    return named_payload(item, content_type)[1]


def named_payload(
    item: Item, content_type: object = None, keys: Sequence[str] = PAYLOAD_KEYS
) -> tuple[str, Any]:
    """As `payload`, with the name of the field that it was found in.

    Args:
        keys: where it is looked for, in this order.
    """
    for key in keys:
        if key in item:
            value = item[key]
            if isinstance(value, str | bytes | bytearray | memoryview) and not value:
                raise BadInput(key, "is empty")
            return key, value
    if len(item) == 1:
        return next(iter(item.items()))
    if isinstance(content_type, str) and content_type.lower().startswith(FORM_TYPE):
        raise BadInput(
            "body",
            f"came as a form ({FORM_TYPE}, which is what curl -d says) without a field `data`; "
            "send it with the header Content-Type: application/json or text/plain",
        )
    raise BadInput("body", "is missing; send the data as the request's body or as a field `data`")


def parse_json(raw: bytes | bytearray | memoryview | str, field: str = "body") -> Any:
    """Raises BadInput where the text is not JSON."""
    try:
        return json.loads(raw if isinstance(raw, str) else bytes(raw))
    except ValueError as wrong:
        raise BadInput(field, f"is not JSON ({wrong})") from None
    except RecursionError:
        raise BadInput(field, "is nested too deeply") from None


def answer(context: Context, outcomes: Sequence[Mapping[str, Any] | Refused]) -> list[bytes]:
    """The batch's bodies, with content type and, for what is refused, its status set.

    An error has the shape of the server's own: `code`, `type` and `message`.
    """
    bodies = []
    for index, outcome in enumerate(outcomes):
        context.set_response_content_type(index, "application/json")
        if isinstance(outcome, Refused):
            context.set_response_status(outcome.status, outcome.phrase, index)
            outcome = problem(outcome)
        bodies.append(json.dumps(outcome, allow_nan=False, separators=(",", ":")).encode())
    return bodies


def problem(refused: Refused) -> dict[str, Any]:
    """An error's body, in the shape of the server's own."""
    return {"code": refused.status, "type": refused.kind, "message": str(refused)}
