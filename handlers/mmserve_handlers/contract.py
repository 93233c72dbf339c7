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


class BadInput(ValueError):
    """The client's mistake; the message names the field and what to send instead."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


def payload(item: Item, content_type: object = None) -> Any:
    """The value of a request that carries its data, as it came.

    A form with one field of any name is taken too.

    Args:
        item: the request.
        content_type: its header, for the message where there is no data.

    Raises:
        BadInput: there is none, it is empty, or there are several that could be meant.
    """
    for key in PAYLOAD_KEYS:
        if key in item:
            value = item[key]
            if isinstance(value, str | bytes | bytearray | memoryview) and not value:
                raise BadInput(key, "is empty")
            return value
    if len(item) == 1:
        return next(iter(item.values()))
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


def answer(context: Context, outcomes: Sequence[Mapping[str, Any] | BadInput]) -> list[bytes]:
    """The batch's bodies, with content type and, for a `BadInput`, status 400 set.

    An error has the shape of the server's own: `code`, `type` and `message`.
    """
    bodies = []
    for index, outcome in enumerate(outcomes):
        context.set_response_content_type(index, "application/json")
        if isinstance(outcome, BadInput):
            context.set_response_status(400, "Bad Request", index)
            outcome = {"code": 400, "type": "BadRequestException", "message": str(outcome)}
        bodies.append(json.dumps(outcome, allow_nan=False, separators=(",", ":")).encode())
    return bodies
