"""Bytes as a request's body: a value for the handler, or a refusal in words."""

from __future__ import annotations

import json
import math

from mmserve.runtime.failures import BadInput
from mmserve.runtime.inputs import row
from mmserve.wire.messages import Item, Parameter


def one_input(data: bytes) -> None:
    """Raises what a client should never cause in a worker.

    The first line is the media type; the rest is the body.
    """
    kind, _, body = data.partition(b"\n")
    media_type = kind.decode("latin-1")
    item = Item("id", [], [Parameter("body", len(body), media_type)])
    try:
        value = row(item, memoryview(body), decode=True)["body"]
    except BadInput as refusal:
        assert str(refusal)
        return
    if type(value) is bytearray:
        assert value == body
    elif media_type == "application/json":
        expected = json.loads(body.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
        assert repr(value) == repr(expected) or (
            isinstance(value, float) and math.isnan(value) and math.isnan(expected)
        )
