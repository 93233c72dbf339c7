"""Bytes as a handler's values: quiet."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mmserve.runtime.failures import BadInput
from mmserve.runtime.inputs import row
from mmserve.wire.messages import Item, Parameter
from tests.runtime.test_results import values


def value_of(body: bytes, content_type: str) -> Any:
    item = Item("id", [], [Parameter("body", len(body), content_type)])
    return row(item, memoryview(body), decode=True)["body"]


@given(values, st.sampled_from(["application/json", "APPLICATION/json ; charset=UTF8"]))
def test_json_means_what_it_means_to_the_standard_library(value: Any, content_type: str) -> None:
    text = json.dumps(value)
    assert repr(value_of(text.encode(), content_type)) == repr(json.loads(text))


@given(st.binary(max_size=30))
def test_any_bytes_are_json_or_refused_as_the_standard_library_would(body: bytes) -> None:
    try:
        value = value_of(body, "application/json")
    except BadInput:
        try:
            json.loads(body.decode("utf-8"))
        except ValueError:
            return
        raise
    assert repr(value) == repr(json.loads(body.removeprefix(b"\xef\xbb\xbf").decode()))


@given(st.text(), st.sampled_from(["utf-8", "utf-16", "utf-32", "cp1252", "latin-1", "shift_jis"]))
def test_text_comes_back_in_any_charset_that_can_write_it(text: str, charset: str) -> None:
    try:
        body = text.encode(charset)
    except UnicodeEncodeError:
        return
    assert value_of(body, f"text/plain; charset={charset}") == body.decode(charset)


@given(st.text(max_size=40))
def test_any_media_type_is_understood_or_opaque(content_type: str) -> None:
    try:
        value = value_of(b"1", content_type)
    except BadInput:
        return
    assert value in (1, "1", bytearray(b"1"))


def test_a_bytearray_of_our_own_is_handed_on_without_a_copy() -> None:
    payload = bytearray(b"large")
    item = Item("id", [], [Parameter("body", 5, "image/jpeg")])
    assert row(item, payload, decode=True)["body"] is payload
