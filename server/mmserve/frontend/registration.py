"""What a client asks of management, out of a query or a JSON text. Quiet."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mmserve.errors import BadRequest
from mmserve.frontend import lenient_json
from mmserve.frontend.forms import first_values
from mmserve.models.port import Registration

#: Bytes of a JSON registration: read in Python, in the front's only thread.
MAX_JSON = 65_536

#: Of one model. Each is a slot and a task before it is a process; a number with a digit too many
#: would end the server, not the request.
MAX_WORKERS = 10_000

RUNTIMES = ("python", "python2", "python3")
_YES_NO: Mapping[str, bool] = {
    **dict.fromkeys(("yes", "true", "y", "1"), True),
    **dict.fromkeys(("no", "false", "n", "0"), False),
}
_INT = re.compile(r"[+-]?\d+")
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1  # an int of Java
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def asked_by_query(query: str) -> Registration:
    """A registration out of a raw query; `response_timeout` is in minutes there.

    Raises:
        BadRequest: what is wrong with it.
    """
    values = first_values(query)
    timeout_minutes = _lenient_int(values, "response_timeout")
    synchronous = values.get("synchronous")
    return _registration(
        {name: values.get(name) for name in _TEXTS},
        {name: _lenient_int(values, name) for name in _INTS},
        synchronous=True if synchronous is None else synchronous.lower() == "true",
        response_timeout_s=None if timeout_minutes is None else timeout_minutes * 60.0,
    )


def asked_by_json(body: bytes) -> Registration:
    """A registration out of a JSON object; `response_timeout` is in seconds there.

    Raises:
        BadRequest: what is wrong with it, and where.
    """
    values = _object(body)
    timeout_s = _json_int(values, "response_timeout")
    return _registration(
        {name: _json_text(values, name) for name in _TEXTS},
        {name: _json_int(values, name) for name in _INTS},
        synchronous=_json_bool(values, "synchronous", default=True),
        response_timeout_s=None if timeout_s is None else float(timeout_s),
    )


def asked_workers(query: str) -> tuple[int, int, bool]:
    """A scaling: least and most workers, and whether to wait for them.

    Raises:
        BadRequest: the numbers make no sense, or there would be more than `MAX_WORKERS`.
    """
    values = first_values(query)
    least = _lenient_int(values, "min_worker")
    least = 1 if least is None else least
    most = _lenient_int(values, "max_worker")
    most = least if most is None else most
    if most < least:
        raise BadRequest("max_worker cannot be less than min_worker.")
    if least < 0:
        raise BadRequest("min_worker cannot be negative.")
    _check_workers("min_worker", least)
    return least, most, values.get("synchronous", "").lower() == "true"


def asked_page(query: str) -> tuple[int, int]:
    """`limit` and `next_page_token` of a list. Raises BadRequest for a broken query."""
    values = first_values(query)
    limit = _lenient_int(values, "limit")
    start = _lenient_int(values, "next_page_token")
    return 100 if limit is None else limit, start or 0


_TEXTS = ("url", "model_url", "model_name", "handler", "runtime", "preload_model")
_INTS = ("batch_size", "max_batch_delay", "initial_workers")


def _registration(
    texts: Mapping[str, str | None],
    numbers: Mapping[str, int | None],
    *,
    synchronous: bool,
    response_timeout_s: float | None,
) -> Registration:
    url = texts["url"]
    if url is None:
        url = texts["model_url"]  # as the API description spells it
    if not url:
        raise BadRequest("Parameter url is required.")
    for name, text in texts.items():
        if text is not None and _CONTROL.search(text):
            raise BadRequest(f"Parameter {name} must not contain control characters.")
    runtime = texts["runtime"]
    if runtime is not None and runtime not in RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    batch_size, initial_workers = numbers["batch_size"], numbers["initial_workers"]
    _check_workers("initial_workers", initial_workers or 0)
    return Registration(
        url=url,
        model_name=texts["model_name"] or None,
        handler=texts["handler"] or None,
        runtime=runtime,
        batch_size=1 if batch_size is None else batch_size,
        max_batch_delay_ms=numbers["max_batch_delay"],
        initial_workers=None if initial_workers is None else max(0, initial_workers),
        synchronous=synchronous,
        response_timeout_s=(
            None if response_timeout_s is None or response_timeout_s < 0 else response_timeout_s
        ),
        preload_model=_yes_or_no("preload_model", texts["preload_model"]),
    )


def _check_workers(name: str, count: int) -> None:
    if count > MAX_WORKERS:
        raise BadRequest(f"Parameter {name} must be at most {MAX_WORKERS}.")


def _yes_or_no(name: str, text: str | None) -> bool | None:
    if text is None:
        return None
    if (answer := _YES_NO.get(text.lower())) is None:
        raise BadRequest(f"Parameter {name} must be one of {', '.join(_YES_NO)}, not {text!r}.")
    return answer


# Query: what cannot be read counts as not given


def _lenient_int(values: Mapping[str, str], name: str) -> int | None:
    return _int(values.get(name, ""))


def _int(text: str) -> int | None:
    """A decimal of 32 bits; None for anything else."""
    if len(text) > 20 or not _INT.fullmatch(text):
        return None
    number = int(text)
    return number if _INT_MIN <= number <= _INT_MAX else None


# JSON: what cannot be read is the client's mistake


def _object(body: bytes) -> dict[str, lenient_json.Value]:
    if len(body) > MAX_JSON:
        raise BadRequest(f"The JSON of a registration is at most {MAX_JSON} bytes.")
    try:
        value = lenient_json.parse(body.decode())
    except UnicodeDecodeError as error:
        raise BadRequest(f"Malformed JSON: not UTF-8, at byte {error.start}.") from None
    except lenient_json.NotJson as error:
        raise BadRequest(f"Malformed JSON: {error}.") from None
    if not isinstance(value, dict):
        raise BadRequest("The JSON of a registration must be an object.")
    return value


def _json_text(values: Mapping[str, lenient_json.Value], name: str) -> str | None:
    match values.get(name):
        case None:
            return None
        case bool(value):
            return "true" if value else "false"
        case str() | int() | float() as value:
            return str(value)
    raise _refused(name, "a text")


def _json_int(values: Mapping[str, lenient_json.Value], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        number = _int(value.strip())
    elif isinstance(value, bool) or not isinstance(value, int | float):
        number = None
    else:
        number = int(value) if value == value // 1 and _INT_MIN <= value <= _INT_MAX else None
    if number is None:
        raise _refused(name, "an integer of 32 bits")
    return number


def _json_bool(values: Mapping[str, lenient_json.Value], name: str, *, default: bool) -> bool:
    match values.get(name):
        case None:
            return default
        case bool(value):
            return value
        case str(value):
            return value.lower() == "true"
    raise _refused(name, "true or false")


def _refused(name: str, wanted: str) -> BadRequest:
    return BadRequest(f"Parameter {name} must be {wanted}.")
