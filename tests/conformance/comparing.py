"""Where two replies to one request differ. Quiet: replies in, differences out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mmserve_loadtest.http import Reply

#: Texts of one server or one run, and what they are taken for. In this order.
NORMAL: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "<uuid>"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"), "<time>"),
    (re.compile(r'("id": ")\d{1,5}(-[0-9a-f]{8})*"'), r'\1<id>"'),
    (re.compile(r'("(memoryUsage|pid)": )\d+'), r"\g<1>0"),
    (re.compile(r"/tmp/mmsb-\w+/|/tmp/tmp\w+/"), "<home>/"),
)

#: Messages that Multi Model Server ends in words of its own, or that ours goes on to explain: they
#: are the same when both begin like this.
PREFIXES = (
    "Invalid HTTP message.",
    "Requested resource is not found",
    "Requested method is not allowed",
    re.compile(r"No worker is available to serve request for model: .*?\.(?=\s|$)"),
    "Failed to start workers",
    "Worker died.",
    re.compile(r"Failed to download model from: \S+?(, code: \d+)?(?=[\s,(]|$)"),
    re.compile(r"Model not found in model store: \S+"),
    re.compile(r"Relative path is not allowed in url: \S+"),
    re.compile(r"Invalid model url: \S+"),
)


class Difference(NamedTuple):
    """One aspect in which two replies differ.

    Attributes:
        aspect: `status`, `reason`, `header:NAME`, `body` for the bytes, `json:/PATH` for a value
            of a JSON body, `json:/PATH!order` for the order of an object's keys, `json!layout` for
            its blanks and escapes, `outcome` when one gave no reply, `closes` for the connection.
        ours, theirs: short texts; "absent" where there is nothing.
    """

    aspect: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.aspect}: ours {self.ours}, theirs {self.theirs}"


#: What came of a request: a reply, or the words for why there is none.
Outcome = Reply | str


def differences(ours: Outcome, theirs: Outcome) -> list[Difference]:
    """Every aspect in which the two differ, ids, times and the like taken for equal."""
    if isinstance(ours, str) or isinstance(theirs, str):
        told = [
            each if isinstance(each, str) else f"reply {each.status}" for each in (ours, theirs)
        ]
        return [] if told[0] == told[1] else [Difference("outcome", *told)]
    return [*_head_differences(ours, theirs), *_body_differences(ours.body, theirs.body)]


def _head_differences(ours: Reply, theirs: Reply) -> Iterator[Difference]:
    if ours.status != theirs.status:
        yield Difference("status", str(ours.status), str(theirs.status))
    if ours.reason != theirs.reason and ours.status == theirs.status:
        yield Difference("reason", _short(ours.reason), _short(theirs.reason))
    # The length is that of the body, which is compared itself.
    mine, other = _headers(ours, len(ours.body)), _headers(theirs, len(theirs.body))
    for name in sorted(mine.keys() | other.keys()):
        if (value := mine.get(name, "absent")) != (wanted := other.get(name, "absent")):
            yield Difference(f"header:{name}", value, wanted)


def _headers(reply: Reply, length: int) -> dict[str, str]:
    """Names in lower case; several of a name in one text, in their order."""
    merged: dict[str, str] = {}
    for name, value in reply.headers:
        value = normal(value)
        if name.lower() == "content-length" and value == str(length):
            value = "right"
        merged[name.lower()] = (
            f"{merged[name.lower()]} | {value}" if name.lower() in merged else value
        )
    return merged


def _body_differences(ours: bytes, theirs: bytes) -> Iterator[Difference]:
    if ours == theirs:
        return
    mine, other = (normal(body.decode("utf-8", "backslashreplace")) for body in (ours, theirs))
    if mine == other:
        return
    try:
        values = json.loads(mine), json.loads(other)
    except ValueError:
        yield Difference("body", mine[:300] or "absent", other[:300] or "absent")
        return
    found = [each for each in _json_differences("", *values) if not _is_prose(each, values[1])]
    yield from found
    if not found and values[0] == values[1]:
        yield Difference("json!layout", _short(mine), _short(other))


def _json_differences(path: str, ours: object, theirs: object) -> Iterator[Difference]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        shared = [key for key in theirs if key in ours]
        if [key for key in ours if key in theirs] != shared:
            yield Difference(f"json:{path}!order", _short(list(ours)), _short(list(theirs)))
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            below = f"{path}/{key}"
            if key not in ours:
                yield Difference(f"json:{below}", "absent", _short(theirs[key]))
            elif key not in theirs:
                yield Difference(f"json:{below}", _short(ours[key]), "absent")
            else:
                yield from _json_differences(below, ours[key], theirs[key])
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _json_differences(f"{path}/{index}", mine, other)
    elif path == "/message" and isinstance(ours, str) and isinstance(theirs, str):
        if ours != theirs and not begin_alike(ours, theirs):
            yield Difference(f"json:{path}", _short(ours), _short(theirs))
    elif ours != theirs or type(ours) is not type(theirs):
        yield Difference(f"json:{path or '/'}", _short(ours), _short(theirs))


def _is_prose(difference: Difference, theirs: object) -> bool:
    """Descriptions in an OpenAPI document: both have one, each in words of its own."""
    is_description = difference.aspect.endswith("/description")
    is_there = "absent" not in (difference.ours, difference.theirs)
    return is_description and is_there and isinstance(theirs, dict) and "openapi" in theirs


def begin_alike(ours: str, theirs: str) -> bool:
    """Whether both messages begin with the same one of `PREFIXES`."""
    for prefix in PREFIXES:
        if isinstance(prefix, str):
            if ours.startswith(prefix) and theirs.startswith(prefix):
                return True
        elif (
            (mine := prefix.match(ours)) and (other := prefix.match(theirs)) and mine[0] == other[0]
        ):
            return True
    return False


def normal(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, replacement in NORMAL:
        text = pattern.sub(replacement, text)
    return text


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else text[:297] + "..."
