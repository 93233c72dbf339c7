"""JSON as Multi Model Server prints it."""

from __future__ import annotations

from typing import Any

import msgspec

#: Multi Model Server writes its JSON so that it may stand inside HTML.
_ESCAPES = (
    (b"<", b"\\u003c"),
    (b">", b"\\u003e"),
    (b"&", b"\\u0026"),
    (b"=", b"\\u003d"),
    (b"'", b"\\u0027"),
    ("\u2028".encode(), b"\\u2028"),
    ("\u2029".encode(), b"\\u2029"),
)


def pretty(value: Any) -> bytes:
    """UTF-8 with an indent of two spaces and a final newline.

    Args:
        value: what msgspec can encode; `UNSET` fields of structs are left out.
    """
    return _html_safe(msgspec.json.format(_encode(value), indent=2)) + b"\n"


def _html_safe(encoded: bytes) -> bytes:
    """Encoded JSON with `< > & = '` and the two line separators written as `\\u003c`."""
    # All of them can stand in strings only, so that replacing them anywhere is right.
    for character, escape in _ESCAPES:
        if character in encoded:
            encoded = encoded.replace(character, escape)
    return encoded


def text_literal(text: str) -> bytes:
    """One JSON string, quotes included, escaped as in `pretty`."""
    return _html_safe(_encode(text))


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        # A lone surrogate, from a file name that is not UTF-8 or from a handler's message.
        plain = msgspec.to_builtins(value)
        return msgspec.json.encode(_without_surrogates(plain))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list | tuple):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(v) for key, v in value.items()}
    return value
