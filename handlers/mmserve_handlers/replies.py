"""What goes back: JSON, or numbers as an `.npy` file where the request's `Accept` asks for it.

    Accept: application/json                     JSON, which is also what comes where nothing fits
    Accept: application/x-npy                    one array, as `numpy.load` reads it
    Accept: application/x-npy, */*;q=0.5         the same: what is named wins over what is not

An error is always JSON.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from mmserve_handlers.contract import Context, Refused, problem

if TYPE_CHECKING:
    import torch

JSON, NPY = "application/json", "application/x-npy"

#: A result; a function where it takes time to make and may not be wanted.
Result = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


def reply(
    context: Context, index: int, result: Result, array: torch.Tensor | numpy.ndarray | None = None
) -> bytes:
    """The body of one request's answer, and its content type set.

    Args:
        index: the request's place in the batch.
        result: what a reader of JSON gets. NaN and infinity have no place in it.
        array: what a reader of numbers gets; without it everybody gets JSON.

    Raises:
        ValueError: the result has NaN or infinity in it.
    """
    if array is not None and wants_npy(context.get_request_header(index, "accept")):
        context.set_response_content_type(index, NPY)
        return npy_bytes(array)
    context.set_response_content_type(index, JSON)
    said = result() if callable(result) else result
    return json.dumps(said, allow_nan=False, separators=(",", ":")).encode()


def refuse(context: Context, index: int, refused: Refused) -> bytes:
    """The body of one request's error, in the server's own shape; content type and status set."""
    context.set_response_status(refused.status, refused.phrase, index)
    context.set_response_content_type(index, JSON)
    return json.dumps(problem(refused), separators=(",", ":")).encode()


def npy_bytes(array: torch.Tensor | numpy.ndarray) -> bytes:
    """An array as an `.npy` file; of a tensor what numpy has no type for becomes float32."""
    file = io.BytesIO()
    numpy.save(file, _as_numpy(array), allow_pickle=False)
    return file.getvalue()


def _as_numpy(array: torch.Tensor | numpy.ndarray) -> numpy.ndarray:
    if isinstance(array, numpy.ndarray):
        return array
    array = array.detach().cpu()
    try:
        return array.numpy()  # type: ignore[no-any-return,unused-ignore]
    except TypeError:  # bfloat16
        return array.float().numpy()  # type: ignore[no-any-return,unused-ignore]


class _Range(NamedTuple):
    """One part of an `Accept` header that fits a media type; the greatest decides."""

    precision: int  # 0 for */*, 1 for application/*, 2 for the type itself
    quality: float
    earliness: int


def wants_npy(accept: object) -> bool:
    """Whether an `Accept` header asks for an `.npy` file rather than for JSON.

    Source: RFC 9110, 12.5.1; where both are named alike, the first one.
    """
    return isinstance(accept, str) and "npy" in accept.lower() and _prefers_npy(accept)


@functools.lru_cache(maxsize=64)
def _prefers_npy(accept: str) -> bool:
    ranges: dict[str, _Range] = {}
    for place, part in enumerate(accept.lower().split(",")):
        name, *parameters = (word.strip() for word in part.split(";"))
        for kind in (JSON, NPY):
            precision = {"*/*": 0, "application/*": 1, kind: 2}.get(name)
            if precision is not None:
                found = _Range(precision, _quality(parameters), -place)
                ranges[kind] = max(found, ranges.get(kind, found))
    npy, as_json = ranges.get(NPY), ranges.get(JSON, _Range(0, 0.0, 0))
    if npy is None or npy.precision < 2 or npy.quality == 0:
        return False
    if as_json.precision < 2:
        return npy.quality >= as_json.quality
    return npy[1:] > as_json[1:]


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0
