"""What a handler returned, turned into bytes."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mmserve.runtime.failures import BadReply
from mmserve.wire.framing import Bytes

NOT_A_LIST = "Invalid model predict output"
WRONG_LENGTH = "number of batch response mismatched"
UNSUPPORTED = "Unsupported model output data type."

_compact = json.JSONEncoder().encode
_indented = msgspec.json.format


def body_of(value: Any) -> tuple[Bytes, bool]:
    """Body of one result, and whether it is JSON that we encoded.

    bytes and bytearray are sent as they are, text as UTF-8, all else as JSON.

    Raises:
        BadReply: there is no way to send it.
    """
    kind = type(value)
    if kind is bytes or kind is bytearray:
        return value, False
    if isinstance(value, str):
        try:
            return str.encode(value, "utf-8"), False
        except UnicodeEncodeError:  # a lone surrogate; replacing it would alter the result
            raise BadReply(UNSUPPORTED) from None
    if isinstance(value, bytes | bytearray):
        return bytes(value), False
    try:
        return json_of(value), True
    except MemoryError:
        raise
    except Exception:  # TypeError, a circle, and whatever a type of the user's raises
        raise BadReply(UNSUPPORTED) from None


def json_of(value: Any) -> bytes:
    """Byte for byte `json.dumps(value, indent=2)`, in a fraction of its time.

    With an indent the standard library walks the value in Python; so we encode without, in C, and
    have the white space put in, in C.
    """
    compact = _compact(value).encode("ascii")
    try:
        return _indented(compact, indent=2)
    except Exception:  # NaN and lone surrogates, which Python's JSON has and JSON has not
        return json.dumps(value, indent=2).encode("ascii")
