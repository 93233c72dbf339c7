"""What comes in, by its first bytes and its media type: JSON, arrays, or a file of another kind.

An array travels as an `.npy` file (`numpy.save`, media type `application/x-npy`) or as
safetensors (`application/vnd.safetensors`): both say their own shape and type, so that a body
needs no headers beside it. Neither is ever unpickled. What is sent as
`application/octet-stream`, or without a type, is told apart by its first bytes.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy

from mmserve_handlers.contract import BadInput, Context, Item

if TYPE_CHECKING:
    import torch

Bytes = bytes | bytearray | memoryview
Kind = Literal["json", "npy", "safetensors", "file"]

NPY_TYPES = ("application/x-npy", "application/npy")
SAFETENSORS_TYPES = ("application/vnd.safetensors", "application/x-safetensors")
_NPY_MAGIC = b"\x93NUMPY"
#: The greatest header that the format allows. Source: safetensors, README, "Format".
_MAX_SAFETENSORS_HEADER = 100_000_000
ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SPACES = re.compile(r"[ \t\r\n]+")
_URL_SAFE = str.maketrans("-_", "+/")


def media_type(header: object) -> str:
    """A `Content-Type` without its parameters, in lower case; "" where there is none."""
    return header.partition(";")[0].strip().lower() if isinstance(header, str) else ""


def media_type_of(context: Context, index: int, field: str) -> str:
    """The media type of a request's body, or of one field of its form."""
    if field == "body":
        return media_type(context.get_request_header(index, "content-type"))
    header = context.get_request_header(index, field)
    return media_type(header.get("content-type") if isinstance(header, Mapping) else None)


def kind_of(raw: Bytes, type_: str = "") -> Kind:
    """What a body is. A type that says so decides, else its first bytes."""
    if type_ == "application/json":
        return "json"
    if type_ in NPY_TYPES:
        return "npy"
    if type_ in SAFETENSORS_TYPES:
        return "safetensors"
    if type_.startswith("image/"):
        return "file"
    start = bytes(raw[:16])
    if start.startswith(_NPY_MAGIC):
        return "npy"
    if start[8:9] == b"{" and _is_safetensors_length(start, len(raw)):
        return "safetensors"
    is_text = bytes(raw[:64]).lstrip(b" \t\r\n\xef\xbb\xbf")[:1] in (b"{", b"[", b'"')
    return "json" if is_text else "file"


def _is_safetensors_length(start: bytes, size: int) -> bool:
    length = int.from_bytes(start[:8], "little")
    return 2 <= length <= min(size - 8, _MAX_SAFETENSORS_HEADER)


def from_base64(text: str, field: str) -> bytes:
    """Bytes of base64, both alphabets, with or without padding, white space or `data:` before it.

    Raises:
        BadInput: it is something else, or nothing.
    """
    said = _DATA_URI.match(text)
    letters = _SPACES.sub("", text[said.end() :] if said else text).translate(_URL_SAFE)
    letters = letters.rstrip("=")
    try:
        decoded = base64.b64decode(letters + "=" * (-len(letters) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadInput(field, "is a text, but not base64") from None
    if not decoded:
        raise BadInput(field, "is empty")
    return decoded


def npy_array(raw: Bytes, field: str) -> numpy.ndarray:
    """The array of an `.npy` file, as a view of its bytes; in native byte order.

    Raises:
        BadInput: it is no such file, has objects or records in it, or another length than it says.

    Source: numpy.lib.format, versions 1.0 and 2.0 (3.0 is only for records).
    """
    import io

    view = memoryview(raw)
    file = io.BytesIO(view[: 12 + 65536])  # a header of numbers takes some hundred bytes
    try:
        version = numpy.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError
        reader = {1: "read_array_header_1_0", 2: "read_array_header_2_0"}[version[0]]
        shape, is_fortran, dtype = getattr(numpy.lib.format, reader)(file)
    except Exception:  # its parser raises whatever a stranger's text makes it
        raise BadInput(field, "is not an .npy file; numpy.save writes one") from None
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise BadInput(field, f"is an .npy file of {dtype}; only plain numbers are taken")
    if dtype.itemsize == 0 or any(not 0 <= side < 1 << 31 for side in shape):
        raise BadInput(field, "is an .npy file of an impossible shape or type")
    expected, found = math.prod(shape) * dtype.itemsize, len(view) - file.tell()
    if expected != found:
        raise BadInput(
            field,
            f"is an .npy file cut short or too long: shape {shape} of {dtype} takes {expected} "
            f"bytes and {found} are there",
        )
    array = numpy.frombuffer(view[file.tell() :], dtype)
    array = array.reshape(shape, order="F" if is_fortran else "C")
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def safetensors(raw: Bytes, field: str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, by name.

    Raises:
        BadInput: it is no such file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found: dict[str, torch.Tensor] = load(bytes(raw))
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError):
        raise BadInput(field, "is not a whole safetensors file") from None
    return found


def option(item: Item, name: str) -> Any:
    """A parameter that came beside the data, in the query or in a form, as text; or None.

    Raises:
        BadInput: it is no text.
    """
    value = item.get(name)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise BadInput(name, "is not text in UTF-8") from None
    return value


def attributes(header: object) -> dict[str, str]:
    """`name=value` pairs of a header, divided by commas or semicolons; what is no pair is left out.

    `X-Amzn-SageMaker-Custom-Attributes` is the one header that SageMaker passes on to a model, and
    so the place for what has none in a body that is a file.
    """
    pairs = re.split("[,;]", header) if isinstance(header, str) else []
    split = (pair.partition("=") for pair in pairs)
    return {name.strip(): value.strip() for name, is_pair, value in split if is_pair}
