"""Which route a path is. Quiet: text in, a route out.

The raw path is split at `/` first and each part is percent-decoded after, so that a model's name
may hold a slash (`%2F`) on every route. `+` stands for itself, parts at the end that are empty
are dropped, letter case counts.

The first part decides, and then the number of parts. `/{model}/predict`, the oldest spelling,
loses to any route that begins with a word of ours: `/models/predict` manages the model `predict`
(Multi Model Server answers 404 there when one listener has both APIs), and a model called `models`
is reached as `/predictions/models`.
"""

from __future__ import annotations

import re
from enum import Enum
from urllib.parse import unquote_to_bytes

from mmserve.errors import BadRequest

BROKEN_PERCENT = re.compile("%(?![0-9a-fA-F]{2})")


class Route(Enum):
    """What a path means; some only exist on a listener that has inference or management."""

    ROOT = "root"
    DESCRIPTION = "description"  # /api-description
    NO_METHOD = "no method"  # known path, no method is allowed
    PING = "ping"
    PREDICT = "predict"  # query parameters stay with the server
    PREDICT_WITH_QUERY = "predict with query"
    INVOCATIONS = "invocations"  # the name is in the query, the form or nowhere
    MODELS = "models"
    MODEL = "model"
    UNKNOWN = "unknown"


INFERENCE = frozenset({Route.PING, Route.PREDICT, Route.PREDICT_WITH_QUERY, Route.INVOCATIONS})
MANAGEMENT = frozenset({Route.MODELS, Route.MODEL})


def route_of(path: str) -> tuple[Route, str]:
    """The route of a raw path, and the model's name where the path has one ("" elsewhere).

    Raises:
        BadRequest: a part is not percent-encoded UTF-8.
    """
    if path == "/":
        return Route.ROOT, ""
    parts = segments(path)
    match parts:
        case None:
            return Route.UNKNOWN, ""
        case []:  # "//"
            return Route.NO_METHOD, ""
        case ["api-description"]:
            return Route.DESCRIPTION, ""
        case ["api-description", *_]:
            return Route.NO_METHOD, ""
        case ["ping", *_]:
            return Route.PING, ""
        case ["predictions", name, *_]:
            return Route.PREDICT, name
        case ["invocations"]:
            return Route.INVOCATIONS, ""
        case ["models"]:
            return Route.MODELS, ""
        case ["models", name]:
            return Route.MODEL, name
        case ["models", name, "invoke"]:
            return Route.PREDICT_WITH_QUERY, name
        case ["models" | "predictions" | "invocations", *_]:
            return Route.UNKNOWN, ""
        case [name, "predict"]:
            return Route.PREDICT_WITH_QUERY, name
    return Route.UNKNOWN, ""


def segments(path: str) -> list[str] | None:
    """The decoded parts of a raw path; None when it does not begin with a slash.

    Raises:
        BadRequest: a part is not percent-encoded UTF-8.
    """
    if not path.startswith("/"):
        return None
    parts = path.split("/")
    while parts and not parts[-1]:
        parts.pop()
    return [decoded(part) for part in parts[1:]]


def decoded(part: str) -> str:
    """One part of a path, percent-decoded.

    Raises:
        BadRequest: it is not percent-encoded UTF-8.
    """
    if "%" not in part:
        return part
    if (broken := BROKEN_PERCENT.search(part)) is not None:
        around = part[broken.start() : broken.start() + 3]
        raise BadRequest(
            f"The path is not percent-encoded: two digits should follow in {around!r}."
        )
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise BadRequest("The path is not percent-encoded UTF-8.") from None
