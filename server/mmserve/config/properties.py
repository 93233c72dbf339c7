"""The syntax of `config.properties`: bytes in, keys and values out.

Source: the description of `java.util.Properties.load`, which Multi Model Server reads with. Where
Java reads Latin-1, we read UTF-8 first and Latin-1 only where the bytes are not UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mmserve.errors import ConfigurationError

_BLANK = " \t\f"
_LINE_END = re.compile(r"\r\n|\r|\n")
_KEY = re.compile(r"(?:[^\\=: \t\f]|\\.)*")
_SEPARATOR = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_CONTROL = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class Entry(NamedTuple):
    """A value and the number of the line, from 1, on which it begins."""

    value: str
    line: int


def parse(data: bytes) -> dict[str, Entry]:
    """Keys with their values, in the order of their first lines; the last duplicate wins.

    A value keeps its trailing blanks. A key may be empty.

    Raises:
        ConfigurationError: `\\u` without four hexadecimal digits, or half of a surrogate pair.
    """
    entries: dict[str, Entry] = {}
    for line, text in _logical_lines(_decode(data)):
        key = _KEY.match(text)
        assert key is not None  # it matches the empty text too
        separator = _SEPARATOR.match(text, key.end())
        assert separator is not None
        value = text[separator.end() :]
        entries[_unescape(key[0], line)] = Entry(_unescape(value, line), line)
    return entries


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that hold a key, continuations joined, leading blanks off, with their numbers."""
    first, begun = 0, ""
    for number, natural in enumerate(_LINE_END.split(text), start=1):
        line = natural.lstrip(_BLANK)
        if not begun:
            if not line or line[0] in "#!":
                continue
            first = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            begun += line[:-1]
        else:
            yield first, begun + line
            begun = ""
    if begun:  # the file ends in a backslash
        yield first, begun


def _unescape(text: str, line: int) -> str:
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(lambda escape: _character(escape[1], line), text)
    if not _SURROGATE.search(plain):
        return plain
    try:  # Java's characters are UTF-16: two escapes can make one
        return plain.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"line {line}: half of a surrogate pair; write both halves, or the character itself"
        ) from None


def _character(escape: str, line: int) -> str:
    if len(escape) == 5:
        return chr(int(escape[1:], 16))
    if escape == "u":
        raise ConfigurationError(
            f"line {line}: \\u must be followed by four hexadecimal digits; "
            "a backslash itself is written as \\\\"
        )
    return _CONTROL.get(escape, escape)
