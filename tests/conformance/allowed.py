"""Where mmserve may differ from Multi Model Server, and why. Quiet: a table, and who it excuses.

`D…` are the defects of the Multi Model Server reference that are not reproduced, `F…` the field
reports. Every row must still occur, and none may excuse all exchanges of a route.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from http import HTTPStatus
from typing import NamedTuple

from .comparing import Difference


class Allowed(NamedTuple):
    """One reason why replies differ. In all texts `*` stands for anything.

    Attributes:
        reason: `D` or `F` and a number.
        why: what ours does, in words.
        where: exchanges, as `setting / script / exchange`.
        what: aspects of a reply; several with a bar between.
        ours, theirs: what is said there.
    """

    reason: str
    why: str
    where: str
    what: str
    ours: str = "*"
    theirs: str = "*"

    def excuses(self, exchange: str, difference: Difference) -> bool:
        return (
            _fits(self.where, exchange)
            and any(_fits(aspect, difference.aspect) for aspect in self.what.split("|"))
            and _fits(self.ours, difference.ours)
            and _fits(self.theirs, difference.theirs)
        )


def _fits(pattern: str, text: str) -> bool:
    return _compiled(pattern).fullmatch(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    alternatives = (".*".join(map(re.escape, each.split("*"))) for each in pattern.split(" or "))
    return re.compile("|".join(alternatives), re.DOTALL)


#: The aspects of an error in place of another error.
ERROR = "status|json:/code|json:/type|json:/message"
#: The aspects of an error in place of a success, or the other way round.
OUTCOME = f"{ERROR}|json:/status|header:connection|header:content-type|body|json:/"
#: What is absent from replies that the HTTP library of Multi Model Server makes by itself.
BARE = (
    "header:cache-control|header:connection|header:content-type|header:expires|header:pragma"
    "|header:x-request-id|body",
    "no-cache; no-store, must-revalidate, private or close or application/json "
    "or Thu, 01 Jan 1970 00:00:00 UTC or no-cache or <uuid> "
    'or {*"code": 413,*max_request_size sets the limit.* '
    'or {*"code": 417,*only 100-continue is.*',
    "absent",
)
#: Reason phrases of the standard, and what Multi Model Server itself calls other statuses.
PHRASES = " or ".join(
    [f'"{status.phrase}"' for status in HTTPStatus]
    + ['"Success (*)"', '"Redirection (*)"', '"Client Error (*)"', '"Server Error (*)"']
    + ['"Unknown Status (*)"']
)


def error(
    reason: str, why: str, where: str, ours: tuple[int, str, str], theirs: tuple[int, str, str]
) -> Allowed:
    """One error in place of another, each as status, type and message."""
    texts = (f'{status} or "{kind}" or "{message}"' for status, kind, message in (ours, theirs))
    return Allowed(reason, why, where, ERROR, *texts)


def refusal(reason: str, why: str, where: str, ours: tuple[int, str, str], theirs: str) -> Allowed:
    """An error in place of the success `theirs`."""
    status, kind, message = ours
    told = f'{status} or "{kind}" or "*{message}*" or close or application/json or absent'
    told += f' or {{*"message": "{message}*'
    return Allowed(reason, why, where, OUTCOME, told, f"200 or keep-alive or absent or {theirs}")


ALLOWED: Sequence[Allowed] = (
    # ---------------------------------------------------------------- what every reply has
    Allowed("D23", "a reason phrase, not an empty one", "*", "reason", PHRASES, '""'),
    Allowed(
        "D23",
        "what was encoded as JSON is labelled so",
        "* / obedience / result * or * / obedience / deed error status, json body",
        "header:content-type",
        "application/json",
        "absent",
    ),
    Allowed(
        "F077",
        "503 says when to come back",
        "* / registrations / *: predict or * / odd scaling / predict none or * / queue full",
        "header:retry-after",
        "1",
        "absent",
    ),
    # ---------------------------------------------------------------- routes
    error(
        "D19",
        "a path that cannot be decoded is a mistake of the client",
        "* / routes* / * /predictions/%zz",
        (400, "BadRequestException", "The path is not percent-encoded: *"),
        (500, "IllegalArgumentException", "invalid hex byte *"),
    ),
    error(
        "F019",
        "an empty model_name counts as missing",
        "plain / routes* / * /invocations?model_name= or several / * / /invocations?model_name=",
        (400, "BadRequestException", "Parameter model_name is required."),
        (404, "ModelNotFoundException", "Model not found: "),
    ),
    # ---------------------------------------------------------------- the wire
    Allowed(
        "D21",
        "a client that wants the connection closed gets it",
        "* / wire / 1.1 ping, close or * / wire / 1.0 ping",
        "header:connection",
        "close",
        "keep-alive",
    ),
    refusal(
        "D21",
        "a version of HTTP that there is not is refused",
        "* / wire / odd version",
        (400, "BadRequestException", "Invalid HTTP message."),
        '"Healthy"',
    ),
    Allowed(
        "D22",
        "the absolute form of a target is served",
        "* / wire / absolute target",
        OUTCOME,
        '200 or keep-alive or "Healthy" or absent',
        '404 or "ResourceNotFoundException" or "Requested resource *" or close or absent',
    ),
    error(
        "D19",
        "a target that is no path is a mistake of the client",
        "* / wire / star",
        (404, "ResourceNotFoundException", "Requested resource is not found*"),
        (500, "ArrayIndexOutOfBoundsException", "Index 1 out of bounds *"),
    ),
    error(
        "D19",
        "a target without a slash is a mistake of the client",
        "* / wire / no slash",
        (400, "BadRequestException", "Invalid HTTP message.*"),
        (500, "ArrayIndexOutOfBoundsException", "Index 1 out of bounds *"),
    ),
    Allowed(
        "F104",
        "413 and 417 are error replies as all others, and say what to do",
        "* / wire / expect the unknown or * / wire / expect, too large",
        *BARE,
    ),
    Allowed(
        "F106",
        "413 is an error reply as all others, and names the limit",
        "* / wire / *body beyond the limit",
        *BARE,
    ),
    # ---------------------------------------------------------------- bodies
    error(
        "D2",
        "a body that cannot be decoded is a mistake of the client, and the worker lives",
        "plain / deadly bodies / *",
        (400, "BadRequestException", "The *"),
        (500, "InternalServerException", "Worker died."),
    ),
    error(
        "D19",
        "a form that cannot be read is a mistake of the client, told without words of Java",
        "* / bodies / * form without values or * / bodies / * form bad escape "
        "or * / bodies / * parts unnamed",
        (400, "BadRequestException", "* form *"),
        (500, "ErrorDataDecoderException", "*"),
    ),
    Allowed(
        "F021",
        "the letter case of a media type does not matter",
        "* / bodies / * json capitals or * / bodies / * text capitals",
        "json:/*/1|json:/*/2",
        '"dict" or "str" or {"a": 1}',
        '"bytearray" or "{\\"a\\": 1}"',
    ),
    Allowed(
        "D38",
        "the charset of a text is honoured",
        "* / bodies / * text latin umlaut",
        OUTCOME,
        '200 or keep-alive or absent or [*["body", "str", "wörter"]]',
        '500 or close or application/json or {"code": 500, *"Worker died."}',
    ),
    # ---------------------------------------------------------------- what handlers do
    Allowed(
        "D25",
        "a message that is no text does not end the worker",
        "* / obedience / deed PredictionException number",
        "json:/message",
        '"5"',
        '"Worker died."',
    ),
    Allowed(
        "D24",
        "a status that is none is refused",
        "* / disobedience / odd status *",
        f"outcome|{OUTCOME}",
        "reply 503 or 503 or application/json or *no whole number from 200 to 999*",
        "no complete reply in time or not HTTP or 1000 or 65536 or absent or ok",
    ),
    Allowed(
        "F026",
        "a reply without a body has no length",
        "* / disobedience / odd status 304",
        "header:content-length",
        "absent",
        "2",
    ),
    error(
        "D25",
        "a circular result fails that request, and the worker lives",
        "* / disobedience / deadly circular",
        (503, "InternalServerException", "Unsupported model output data type."),
        (500, "InternalServerException", "Worker died."),
    ),
    error(
        "D25",
        "a header that is no text fails that request, and the worker lives",
        "* / disobedience / deadly header not text",
        (503, "InternalServerException", "The handler set the header X-A to 5; *"),
        (500, "InternalServerException", "Worker died."),
    ),
    Allowed(
        "D26",
        "a result that is too large fails that request, and the worker lives",
        "* / disobedience / deadly too large or * / disobedience / deadly too large json",
        "json:/message",
        '"The model\'s response of * is larger than *"',
        '"Worker died."',
    ),
    Allowed(
        "D1",
        "every request of a failed batch gets its error",
        "shared / batches / batch *",
        ERROR,
        '503 or 507 or 599 or "Prediction failed" or "Out of resources" or "a" '
        'or "Invalid model predict output" or "Unsupported model output data type." '
        'or "number of batch response mismatched"',
        '500 or "Worker died."',
    ),
    # ---------------------------------------------------------------- registration
    Allowed(
        "F055",
        "describe names the process",
        "* / * describe*",
        "json:/workers/*/pid",
        "0",
        "absent",
    ),
    Allowed(
        "F063",
        "describe says whether a worker was forked or started fresh, and why",
        "* / * describe*",
        "json:/workers/*/start|json:/workers/*/startReason",
        '"fork" or "template" or "the preloaded libraries were not ready, *"',
        "absent",
    ),
    error(
        "D19",
        "JSON that cannot be read is a mistake of the client",
        "* / bad registrations / text malformed or * / bad registrations / text cut off",
        (400, "BadRequestException", "Malformed JSON: *"),
        (500, "JsonSyntaxException", "java.io.EOFException: *"),
    ),
    error(
        "D19",
        "JSON that is no object is a mistake of the client",
        "* / bad registrations / text list or * / bad registrations / text text "
        "or * / bad registrations / text number",
        (400, "BadRequestException", "The JSON of a registration must be an object."),
        (500, "JsonSyntaxException", "java.lang.IllegalStateException: *"),
    ),
    error(
        "D19",
        "JSON that is nothing is a mistake of the client",
        "* / bad registrations / text empty or * / bad registrations / text null",
        (400, "BadRequestException", "*JSON*"),
        (500, "NullPointerException", "Cannot invoke *"),
    ),
    error(
        "D19",
        "a value of the wrong kind is a mistake of the client",
        "* / bad registrations / text url a list or * / bad registrations / text batch *",
        (400, "BadRequestException", "Parameter *"),
        (500, "JsonSyntaxException", "java.lang.*"),
    ),
    Allowed(
        "F007",
        "what is no archive is called so",
        "* / bad registrations / * text file or * / bad registrations / * remote page "
        "or * / bad registrations / * remote empty "
        "or * / manifests / html: register or * / manifests / empty-file: register",
        "json:/message",
        '"*It is not a valid archive: *"',
        '"Model name is not defined."',
    ),
    error(
        "F007",
        "a damaged archive is the fault of the archive",
        "* / manifests / cut-off: register",
        (400, "InvalidModelException", "*It is not a valid zip archive: *"),
        (500, "InternalServerException", "Failed to save model: *"),
    ),
    error(
        "D31",
        "an empty manifest is a bad archive",
        "* / manifests / empty-manifest: register",
        (400, "InvalidModelException", "Failed to parse signature.json."),
        (500, "NullPointerException", "Cannot invoke *"),
    ),
    error(
        "D31",
        "a manifest without a model is a bad archive",
        "* / manifests / null-model: register",
        (400, "InvalidModelException", "Model name is not defined."),
        (500, "NullPointerException", "Cannot invoke *"),
    ),
    refusal(
        "D14",
        "entries that lead out of the folder are refused",
        "* / manifests / climbs-out: register or * / manifests / absolute: register",
        (400, "InvalidModelException", "is refused"),
        '"Model \\"m\\" registered"',
    ),
    refusal(
        "D11",
        "initialize that raises is a load that failed",
        "* / load failures / initialize-raises: register",
        (500, "InternalServerException", "Failed to start workers"),
        '"Workers scaled"',
    ),
    # ---------------------------------------------------------------- lists and scaling
    Allowed(
        "D17",
        "the last page has no token",
        "* / paging / page ?limit=0* or * / paging / page ?limit=1&next_page_token=4 "
        "or * / paging / page ?limit=5 or * / paging / page ?limit=5&*",
        "json:/nextPageToken",
        "absent",
        '"0" or "2" or "4" or "5"',
    ),
    error(
        "D18",
        "a negative number of workers is refused",
        "* / odd scaling / negative",
        (400, "BadRequestException", "min_worker cannot be negative."),
        (500, "IndexOutOfBoundsException", "Index *"),
    ),
    Allowed(
        "D18",
        "and is not kept",
        "* / odd scaling / describe after negative",
        "json:/minWorkers|json:/maxWorkers|json:/workers",
        '1 or [*"status": "READY"*',
        "-1 or []",
    ),
)


def excuse(exchange: str, difference: Difference) -> Allowed | None:
    """The first row that excuses a difference, or None."""
    return next((row for row in ALLOWED if row.excuses(exchange, difference)), None)


def excuses(exchange: str, found: Iterable[Difference]) -> list[tuple[Difference, Allowed | None]]:
    return [(difference, excuse(exchange, difference)) for difference in found]
