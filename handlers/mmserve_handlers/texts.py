"""Texts of a request: found, checked, and with what the request says about them. Quiet.

    a text                                        one input
    "a text"                                      the same, as JSON
    {"text": "a text", "top_k": 3}                one input, and a parameter
    ["a text", {"text": "another"}]               several; the answer is a list too
    {"inputs": …, "parameters": {"top_k": 3}}     one or several, as Hugging Face's servers take it
    {"instances": […]}                            several, as TensorFlow Serving takes it

Parameters may stand in the query too, and fields in a form. What a parameter says beside one input
is stronger than what is said for all, and that is stronger than the query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmserve_handlers.contract import (
    PAYLOAD_KEYS,
    BadInput,
    Item,
    TooLarge,
    named_payload,
    parse_json,
)
from mmserve_handlers.options import Reader, Wrong, unknown

#: Inputs of one request at most. The time of a request grows with it, and others wait.
MAX_INPUTS = 512
#: Characters of one text at most, some 200,000 tokens; the tokenizer takes a second for it.
MAX_CHARACTERS = 1_000_000
#: A text that begins like JSON and is none.
_SPECIAL_TOKEN = re.compile(r"\s*\[(MASK|UNK|SEP|CLS|PAD)\]")


class Input(NamedTuple):
    """One input.

    Attributes:
        fields: its texts by name, each checked.
        parameters: by name, each checked; those that nobody gave are missing.
        where: what its fields are called in messages: "", "body[1]." or "inputs[1]."; without a
            dot at its end it is a text that has a name itself.
    """

    fields: Mapping[str, str]
    parameters: Mapping[str, Any]
    where: str

    def label(self, name: str) -> str:
        """What a field, or a parameter, is called in messages."""
        if self.where and not self.where.endswith("."):
            return self.where if name in self.fields else name
        return f"{self.where}{name}"


class Asked(NamedTuple):
    """What one request asks."""

    inputs: Sequence[Input]
    is_list: bool


class Form(NamedTuple):
    """What inputs of a task look like.

    Attributes:
        fields: names of its texts.
        needed: those of them that must be there.
        parameters: what each takes.
    """

    fields: tuple[str, ...]
    needed: tuple[str, ...]
    parameters: Mapping[str, Reader]


def body(item: Item, content_type: object, fields: Sequence[str]) -> tuple[str, Any]:
    """A request's data, and what it is called in messages: text, or what the JSON holds.

    Raises:
        BadInput: there is none, or it is neither JSON nor text.
    """
    if not any(key in item for key in PAYLOAD_KEYS) and any(name in item for name in fields):
        return "body", {name: _text(item[name], name) for name in fields if name in item}
    name, value = named_payload(item, content_type)
    is_labelled = isinstance(value, str)
    value = _text(value, name)
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "[", '"'):
        return name, value
    # Unlabelled or text: JSON where it is that, else a text as it stands.
    try:
        return name, parse_json(value, name)
    except BadInput:
        if is_labelled or _SPECIAL_TOKEN.match(value):
            return name, value
        raise


def _text(value: Any, field: str) -> Any:
    if not isinstance(value, bytes | bytearray | memoryview):
        return value
    try:
        return bytes(value).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadInput(field, "is neither JSON nor text in UTF-8") from None


def read(item: Item, content_type: object, form: Form) -> Asked:
    """One request, checked.

    Raises:
        BadInput: names the field that is wrong.
    """
    name, value = body(item, content_type, form.fields)
    shared = _from_query(item, name, form)
    if isinstance(value, dict):
        for key in ("inputs", "instances"):
            if key in value:
                shared |= _parameters(value.get("parameters"), form)
                _refuse_others(value, (key, "parameters"), "")
                name, value = key, value[key]
                break
    if isinstance(value, list):
        return Asked(_several(value, name, form, shared), True)
    where = "" if isinstance(value, dict) and name in PAYLOAD_KEYS else f"{name}."
    return Asked([_one(value, name, where, form, shared)], False)


def _several(
    values: list[Any], name: str, form: Form, shared: Mapping[str, Any]
) -> Sequence[Input]:
    if not values:
        raise BadInput(name, "is an empty list; send at least one input")
    check_count(values, name)
    return [
        _one(value, f"{name}[{i}]", f"{name}[{i}].", form, shared) for i, value in enumerate(values)
    ]


def check_count(values: Sequence[Any], name: str, limit: int = MAX_INPUTS) -> None:
    """Raises BadInput where there are too many."""
    if len(values) > limit:
        raise BadInput(name, f"has {len(values)} inputs; at most {limit} are taken")


def _one(value: Any, name: str, where: str, form: Form, shared: Mapping[str, Any]) -> Input:
    if isinstance(value, str) and len(form.needed) == 1:
        return Input({form.needed[0]: checked(value, name)}, shared, name)
    if not isinstance(value, dict):
        also = "a text or " if len(form.needed) == 1 else ""
        raise BadInput(name, f"must be {also}an object with {_listed(form.needed)}")
    _refuse_others(value, (*form.fields, *form.parameters), where)
    for field in form.needed:
        if field not in value:
            raise BadInput(f"{where}{field}", "is missing; send a text")
    fields = {
        field: checked(value[field], f"{where}{field}")
        for field in form.fields
        if value.get(field) is not None or field in form.needed
    }
    own = {key: _read(form, key, value[key], where) for key in form.parameters if key in value}
    return Input(fields, {**shared, **own}, where)


def checked(text: Any, name: str) -> str:
    """A text that a tokenizer can take. Raises BadInput."""
    if not isinstance(text, str) or not text.strip():
        raise BadInput(name, "must be a text that is not empty")
    if len(text) > MAX_CHARACTERS:
        raise TooLarge(name, f"has {len(text)} characters; at most {MAX_CHARACTERS} are read")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(name, "has half of a surrogate pair") from None
    return text


def _parameters(said: Any, form: Form) -> dict[str, Any]:
    if said is None:
        return {}
    if not isinstance(said, dict):
        raise BadInput("parameters", "must be an object")
    _refuse_others(said, tuple(form.parameters), "parameters.")
    return {key: _read(form, key, value, "parameters.") for key, value in said.items()}


def _from_query(item: Item, body_name: str, form: Form) -> dict[str, Any]:
    """Parameters beside the data; all of them are texts there."""
    found = {}
    for key in form.parameters:
        if key != body_name and key in item:
            text = _text(item[key], key)
            try:
                value = json.loads(text) if isinstance(text, str) else text
            except (ValueError, RecursionError):
                value = text
            found[key] = _read(form, key, value, "")
    return found


def _read(form: Form, key: str, value: Any, where: str) -> Any:
    try:
        return form.parameters[key](value)
    except Wrong as allowed:
        raise BadInput(f"{where}{key}", f"will not do; {allowed}") from None


def _refuse_others(said: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in said:
        if key not in known:
            shown = key.encode(errors="backslashreplace").decode()[:80]
            raise BadInput(f"{where}{shown}", unknown(shown, known))


def _listed(names: Sequence[str]) -> str:
    return " and ".join(f"`{name}`" for name in names)
