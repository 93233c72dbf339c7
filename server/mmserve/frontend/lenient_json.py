"""JSON as Multi Model Server reads it in a registration: what people type passes too.

Beside JSON proper: single quotes, names and texts without quotes, `=` or `=>` for `:`, `;` for
`,`, comments (`//`, `/* */`, `#`), line breaks in strings, `True` in any letter case, a byte
order mark. No trailing comma, no empty element, nothing after the value.
"""

from __future__ import annotations

import re
from typing import NoReturn, TypeAlias

Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"

MAX_DEPTH = 64
_MAX_DIGITS = 400  # beyond the range of a float, and far below where int() refuses

_GAP = re.compile(r"(?:[ \t\r\n\f]+|//[^\r\n]*|\#[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_BARE = re.compile(r"[^/\\;#=,:{}\[\]\s'\"]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_CHUNK = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPES = {
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "'": "'",
    '"': '"',
    "\\": "\\",
    "/": "/",
    "\n": "\n",
}
_FOUR_HEX = re.compile(r"[0-9a-fA-F]{4}")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}


class NotJson(ValueError):
    """The message says what is wrong and where: `…, at line 1, column 5`."""


def parse(text: str) -> Value:
    """The value of one JSON text; of a repeated name the last value counts.

    Raises:
        NotJson: it is no JSON even for a lenient reader, or nested deeper than `MAX_DEPTH`.
    """
    reader = _Reader(text)
    value = reader.value(0)
    reader.skip_gap()
    if reader.at < len(text):
        reader.fail("more text follows the value")
    return value


class _Reader:
    """A place in a text, and what can be read from there."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 1 if text.startswith("\ufeff") else 0

    def fail(self, what: str) -> NoReturn:
        before = self.text[: self.at]
        line = before.count("\n") + 1
        column = self.at - (before.rfind("\n") + 1) + 1
        raise NotJson(f"{what}, at line {line}, column {column}")

    def skip_gap(self) -> None:
        gap = _GAP.match(self.text, self.at)
        self.at = gap.end() if gap else self.at
        if self.text.startswith("/*", self.at):
            self.fail("a comment does not end")

    def peek(self) -> str:
        """The next character that matters; "" at the end."""
        self.skip_gap()
        return self.text[self.at : self.at + 1]

    def value(self, depth: int) -> Value:
        if depth > MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH} levels")
        match self.peek():
            case "{":
                return self.object(depth)
            case "[":
                return self.array(depth)
            case "'" | '"':
                return self.string()
            case "":
                self.fail("the text ends where a value should be")
        return self.bare_value()

    def object(self, depth: int) -> dict[str, Value]:
        self.at += 1
        found: dict[str, Value] = {}
        if self.peek() == "}":
            self.at += 1
            return found
        while True:
            name = self.name()
            if self.peek() not in (":", "="):
                self.fail("a colon should follow the name")
            self.at += 2 if self.text.startswith("=>", self.at) else 1
            found[name] = self.value(depth + 1)
            if self.ends_with("}"):
                return found

    def array(self, depth: int) -> list[Value]:
        self.at += 1
        found: list[Value] = []
        if self.peek() == "]":
            self.at += 1
            return found
        while True:
            found.append(self.value(depth + 1))
            if self.ends_with("]"):
                return found

    def ends_with(self, end: str) -> bool:
        """Steps over the end of an object or array, or over the comma before more of it."""
        character = self.peek()
        if not character:
            self.fail(f"the text ends where {end!r} should be")
        if character not in (end, ",", ";"):
            self.fail(f"a comma or {end!r} should stand here")
        self.at += 1
        return character == end

    def name(self) -> str:
        if self.peek() in ("'", '"'):
            return self.string()
        bare = _BARE.match(self.text, self.at)
        if bare is None:
            self.fail("a name should stand here")
        self.at = bare.end()
        return bare[0]

    def bare_value(self) -> Value:
        bare = _BARE.match(self.text, self.at)
        if bare is None:
            self.fail("a value should stand here")
        word = bare[0]
        if word.lower() in _WORDS:
            self.at = bare.end()
            return _WORDS[word.lower()]
        number = _NUMBER.fullmatch(word)
        if number is None:
            self.at = bare.end()
            return word
        if len(word) > _MAX_DIGITS:
            self.fail("a number is too long")
        self.at = bare.end()
        return float(word) if number[1] or number[2] else int(word)

    def string(self) -> str:
        opened_at = self.at
        quote = self.text[self.at]
        chunk = _CHUNK[quote]
        self.at += 1
        pieces: list[str] = []
        while True:
            plain = chunk.match(self.text, self.at)
            assert plain is not None  # it matches nothing, too
            pieces.append(plain[0])
            self.at = plain.end()
            if self.at == len(self.text):
                self.at = opened_at
                self.fail("a string does not end")
            if self.text[self.at] == quote:
                self.at += 1
                return "".join(pieces)
            pieces.append(self.escape())

    def escape(self) -> str:
        kind = self.text[self.at + 1 : self.at + 2]
        if kind != "u":
            if kind not in _ESCAPES:
                self.fail("unknown escape sequence")
            self.at += 2
            return _ESCAPES[kind]
        unit = self.unit()
        if 0xD800 <= unit < 0xDC00 and self.text.startswith("\\u", self.at):
            low = self.unit()
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
            self.at -= 6
        if 0xD800 <= unit < 0xE000:
            self.at -= 6
            self.fail("half of a surrogate pair")
        return chr(unit)

    def unit(self) -> int:
        digits = _FOUR_HEX.match(self.text, self.at + 2)
        if digits is None:
            self.fail("four hexadecimal digits should follow \\u")
        self.at += 6
        return int(digits[0], 16)
