"""Query, form or plain body: what a request hands to the handler. Quiet: bytes in, parameters out.

A parameter is `(Parameter, value)`; the handler sees one dict, in which the last of a name wins.
Values of a multipart form are views into the body; nothing is copied.
"""

from __future__ import annotations

import binascii
import re
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from mmserve.errors import BadRequest
from mmserve.frontend.routes import BROKEN_PERCENT
from mmserve.wire.charsets import codec_of
from mmserve.wire.messages import Parameter

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks, MultipartParser

Value: TypeAlias = bytes | memoryview
Parameters: TypeAlias = list[tuple[Parameter, Value]]

#: Fields or parts in one form. Each costs some µs of the front's only thread.
MAX_FIELDS = 10_000
_MAX_OPTIONS = 16
_MAX_BOUNDARY = 200  # RFC 2046, section 5.1.1, allows 70

_BROKEN_PERCENT = re.compile(BROKEN_PERCENT.pattern.encode())
_SEPARATOR = re.compile("[&;]")
#: `; name=value` of a header, the value a token or in quotes with backslash escapes. Nothing is
#: tried twice (`*+`) and a quote may stay open: in time linear in the header, whatever it is.
_OPTION = re.compile(
    r';[ \t]*+([^\s=;"]++)[ \t]*+=[ \t]*+(?:"((?:[^"\\]|\\.?)*+)(?:"|$)|([^;]*+))', re.DOTALL
)
_ESCAPED = re.compile(r"\\(.)")


# Query


def query_pairs(query: str) -> list[tuple[str, bytes]]:
    """The (name, value) pairs of a raw query, in order.

    Multi Model Server's rules: `&` or `;` between pairs, `+` is a space, a name without `=` has
    an empty value, a value without a name becomes the name.

    Raises:
        BadRequest: broken percent-encoding.
    """
    if not query:
        return []
    pairs: list[tuple[str, bytes]] = []
    for part in _SEPARATOR.split(query):
        if not part:
            continue
        name, _, value = part.partition("=")
        if not name:
            name, value = value, ""
        pairs.append((_query_bytes(name).decode(errors="replace"), _query_bytes(value)))
    return pairs


def as_parameters(pairs: list[tuple[str, bytes]]) -> Parameters:
    """What the handler sees of a query's pairs."""
    return [(Parameter(name, len(value)), value) for name, value in pairs]


def first_values(query: str) -> dict[str, str]:
    """The first value of each name, as text; bytes that are not UTF-8 become U+FFFD.

    Raises:
        BadRequest: broken percent-encoding.
    """
    values: dict[str, str] = {}
    for name, value in query_pairs(query):
        values.setdefault(name, value.decode(errors="replace"))
    return values


def _query_bytes(text: str) -> bytes:
    if (broken := BROKEN_PERCENT.search(text)) is not None:
        around = text[broken.start() : broken.start() + 3]
        raise BadRequest(
            f"The query is not percent-encoded: two digits should follow in {around!r}."
        )
    return _unquoted(text.replace("+", " ").encode())


def _unquoted(text: bytes) -> bytes:
    """Percent-encoding undone, where it is known to be whole.

    As quoted-printable, which the standard library decodes in C: `urllib` takes a second and a
    half for a form of the default size limit.
    """
    return binascii.a2b_qp(text.replace(b"=", b"%3D").replace(b"%", b"="))


# Body


def media_type(content_type: str) -> str:
    """Type and subtype without parameters, lower case."""
    return content_type.partition(";")[0].strip().lower()


def body_parameters(content_type: str, body: bytes) -> Parameters:
    """What the handler sees of a body.

    Args:
        content_type: the request's header, "" where it has none.

    Raises:
        BadRequest: a form that cannot be read, or one with more than `MAX_FIELDS` fields.
    """
    match media_type(content_type):
        case "application/x-www-form-urlencoded":
            return _urlencoded(body)
        case "multipart/form-data" if boundary := options(content_type).get("boundary"):
            return _multipart(boundary, body)
    return [(Parameter("body", len(body), content_type), body)]


def _urlencoded(body: bytes) -> Parameters:
    fields = body.split(b"&", MAX_FIELDS)
    if len(fields) > MAX_FIELDS:
        raise BadRequest(f"The form has more than {MAX_FIELDS} fields.")
    parameters: Parameters = []
    last = len(fields) - 1
    for number, field in enumerate(fields):
        if not field:
            continue
        if number == last:
            # curl --data @file ends the body with a line break, which is not of the value.
            field = field.rstrip(b"\r\n")
        name, equals, value = field.partition(b"=")
        if not equals and number == last:
            continue  # Multi Model Server drops it; `curl -d text` sends such a body
        if not name:
            raise BadRequest("The form has a field without a name.")
        key = _form_bytes(name).decode(errors="replace")
        value = _form_bytes(value)
        parameters.append((Parameter(key, len(value)), value))
    return parameters


def _form_bytes(text: bytes) -> bytes:
    if b"+" in text:
        text = text.replace(b"+", b" ")
    if b"%" not in text:
        return text
    if (broken := _BROKEN_PERCENT.search(text)) is not None:
        around = text[broken.start() : broken.start() + 3].decode("latin-1")
        raise BadRequest(
            f"The form is not percent-encoded: two digits should follow in {around!r}."
        )
    return _unquoted(text)


def options(header: str) -> dict[str, str]:
    """The `; name=value` options of a header value, names in lower case, quotes taken off.

    At most `_MAX_OPTIONS` of them; the first of a name counts.
    """
    found: dict[str, str] = {}
    for option in islice(_OPTION.finditer(header), _MAX_OPTIONS):
        name, quoted, bare = option.groups(default="")
        found.setdefault(name.lower(), _ESCAPED.sub(r"\1", quoted) or bare.strip())
    return found


# Multipart


def _multipart(boundary: str, body: bytes) -> Parameters:
    if not body:
        return []
    delimiter = b"--" + boundary.encode("latin-1", "replace")
    start = _first_delimiter(delimiter, body)
    if start < 0:
        return []  # as Multi Model Server: the handler sees an empty form
    if start:
        body = body[start:]
    if body.count(b"\n" + delimiter) > MAX_FIELDS + 1:
        # Counted first: a line that only begins like the delimiter costs the parser as much.
        raise _too_many_parts()
    if re.search(b"\r\n" + re.escape(delimiter) + b"[ \t]", body):
        # Blanks may stand there (RFC 2046, 5.1.1), but no client sends any, and versions of the
        # parser differ: to some the line is data, others step over it byte by byte.
        raise BadRequest("The multipart form has a boundary that blanks follow.")
    if body.startswith(delimiter + b"\n"):
        body = _framed_by_crlf(delimiter, body)
    collector = _Collector(body)
    collector.run(delimiter[2:])
    return collector.parameters


def _first_delimiter(delimiter: bytes, body: bytes) -> int:
    """Where the first part begins; a preamble before it says nothing (RFC 2046, 5.1.1).

    -1 where there is no part.
    """
    if len(delimiter) > _MAX_BOUNDARY:
        raise BadRequest("The multipart form's boundary is too long.")
    if body.startswith(delimiter):
        return 0
    at = body.find(b"\r\n" + delimiter)
    return at + 2 if at >= 0 else -1


def _framed_by_crlf(delimiter: bytes, body: bytes) -> bytes:
    """A form that was written by hand with bare line feeds, as the parser wants it.

    Multi Model Server reads such forms. Values stay as they are.
    """
    framed = []
    for section in (b"\n" + body).split(b"\n" + delimiter):
        head, gap, value = section.partition(b"\n\n")
        framed.append(head.replace(b"\n", b"\r\n") + (b"\r\n\r\n" + value if gap else b""))
    return (b"\r\n" + delimiter).join(framed)[2:]


class _Collector:
    """Gathers the parts that the parser finds."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.view = memoryview(body)
        self.parameters: Parameters = []
        self.ended = False
        self.count = 0
        self._begin_part()

    def run(self, boundary: bytes) -> None:
        parser_class, parse_error = _parser()
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_part_data": self._part_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            parser = parser_class(boundary, callbacks)
            parser.write(self.body)
            parser.finalize()
        except parse_error as error:
            raise BadRequest(f"The multipart form cannot be read: {error}.") from None
        if not self.ended:
            raise BadRequest("The multipart form is cut off: its closing boundary is missing.")

    def _begin_part(self) -> None:
        self.headers: dict[str, str] = {}
        self.field = self.header = b""
        self.pieces: list[Value] = []

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self.field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self.header += data[start:end]

    def _end_header(self) -> None:
        try:
            text = self.header.decode()
        except UnicodeDecodeError:
            text = self.header.decode("latin-1")
        self.headers[self.field.decode("latin-1").lower()] = text
        self.field = self.header = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        # As the whole body is one buffer, a part is one piece of it as a rule.
        self.pieces.append(self.view[start:end] if data is self.body else data[start:end])

    def _end_part(self) -> None:
        self.count += 1
        if self.count > MAX_FIELDS:
            raise _too_many_parts()
        disposition = self.headers.get("content-disposition", "")
        found = options(disposition)
        if media_type(disposition) != "form-data" or "name" not in found:
            raise BadRequest(
                f"Part {self.count} of the multipart form has no "
                'Content-Disposition: form-data; name="…".'
            )
        value = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        content_type = self.headers.get("content-type", "")
        if "filename" in found or "filename*" in found:
            part_type = content_type or "application/octet-stream"
            self.parameters.append((Parameter(found["name"], len(value), part_type), value))
            return
        if content_type and (charset := options(content_type).get("charset")):
            value = _as_utf_8(value, charset)
        self.parameters.append((Parameter(found["name"], len(value)), value))

    def _end(self) -> None:
        self.ended = True


def _as_utf_8(value: Value, charset: str) -> Value:
    """A text field in UTF-8, as the handler gets every text field."""
    codec = codec_of(charset)
    if codec is None:
        raise BadRequest(
            f"A part of the multipart form has the charset {charset[:40]!r}, which is not known; "
            "send utf-8."
        )
    if codec == "utf-8":
        return value
    try:
        return bytes(value).decode(codec).encode()
    except ValueError:
        raise BadRequest(f"A part of the multipart form is not text in {codec}.") from None


def _too_many_parts() -> BadRequest:
    return BadRequest(f"The multipart form has more than {MAX_FIELDS} parts.")


@lru_cache(maxsize=1)
def _parser() -> tuple[type[MultipartParser], type[Exception]]:
    """The library's parser and the base of its errors, imported with the first multipart form."""
    import logging

    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    # It logs a warning for every broken form, in words of the client; we answer 400 instead.
    logging.getLogger("python_multipart.multipart").disabled = True
    return MultipartParser, FormParserError
