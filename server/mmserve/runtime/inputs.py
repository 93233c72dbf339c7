"""A request's bytes, turned into what the handler finds in its dict."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from mmserve.runtime.failures import BadInput
from mmserve.wire.charsets import codec_of
from mmserve.wire.framing import Bytes
from mmserve.wire.messages import Item

#: (value's bytes, name of the parameter) → what the handler gets
Decode = Callable[[Bytes, str], Any]

UTF_8_BOM = codecs.BOM_UTF8
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\";\s]+)", re.IGNORECASE)

_fast_json = msgspec.json.Decoder().decode


def row(item: Item, payload: Bytes, *, decode: bool) -> dict[str, Any]:
    """The handler's dict for one request; the last parameter of a name wins.

    Args:
        payload: the values of the item's parameters, one behind the other. A bytearray becomes
            the value as it is when there is only one.
        decode: `decode_input_request`; otherwise every value is a bytearray.

    Raises:
        BadInput: a value is not what its media type says.
    """
    parameters = item.parameters
    if len(parameters) == 1:
        (only,) = parameters
        make = _decoder(only.content_type) if decode and only.content_type else _as_bytes
        return {only.name: make(payload, only.name)}
    values: dict[str, Any] = {}
    view, at = memoryview(payload), 0
    for parameter in parameters:
        end = at + parameter.size
        kind = parameter.content_type
        make = _decoder(kind) if decode and kind else _as_bytes
        values[parameter.name] = make(view[at:end], parameter.name)
        at = end
    return values


def _as_bytes(value: Bytes, _: str) -> bytearray:
    return value if type(value) is bytearray else bytearray(value)


@functools.lru_cache(maxsize=256)
def _decoder(content_type: str) -> Decode:
    """By media type: JSON, text, or opaque. Letter case and parameters make no difference."""
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type == "application/json"
    if not is_json and not media_type.startswith("text"):
        return _as_bytes
    found = _CHARSET.search(content_type)
    charset = found[1] if found else "utf-8"
    if (name := codec_of(charset)) is None:
        return _refuse(charset)
    if is_json and name in ("utf-8", "utf-8-sig"):
        return _json_of_utf_8
    text = _text_of(name)
    return (lambda value, name: _json(text(value, name), name)) if is_json else text


def _refuse(charset: str) -> Decode:
    def refuse(_: Bytes, name: str) -> Any:
        raise BadInput(
            f"{_said(name)} has the charset {charset[:40]!r}, which is not known; send utf-8."
        )

    return refuse


def _text_of(charset: str) -> Decode:
    def text(value: Bytes, name: str) -> str:
        try:
            return str(value, charset)
        except UnicodeDecodeError as wrong:
            raise BadInput(
                f"{_said(name)} is not {charset} text: byte {wrong.start} cannot be decoded."
            ) from None
        except ValueError:
            raise BadInput(f"{_said(name)} is not {charset} text.") from None

    return text


_utf_8 = _text_of("utf-8")


def _json_of_utf_8(value: Bytes, name: str) -> Any:
    try:
        return _fast_json(value)
    except Exception:  # the slow reader decides, and says where it went wrong
        if value[:3] == UTF_8_BOM:
            value = value[3:]
        return _json(_utf_8(value, name), name)


def _json(text: str, name: str) -> Any:
    """As `json.loads`: NaN and lone surrogates pass, a byte order mark does too."""
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise BadInput(f"{_said(name)} is empty, which is no JSON.")
    try:
        return json.loads(text)
    except json.JSONDecodeError as wrong:
        raise BadInput(f"{_said(name)} is not valid JSON: {wrong}.") from None
    except RecursionError:
        raise BadInput(f"{_said(name)} is JSON nested too deeply.") from None
    except ValueError:  # an integer of more digits than Python reads
        raise BadInput(f"{_said(name)} has a number of too many digits.") from None


def _said(name: str) -> str:
    return "The request body" if name == "body" else f"The part {name[:80]!r}"
