from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve_handlers.contract import BadInput, answer, parse_json, payload
from tests.handlers.calls import Context, answers


def test_the_body_comes_before_form_fields() -> None:
    assert payload({"data": b"1", "body": b"2"}) == b"2"
    assert payload({"note": "x", "data": b"1"}) == b"1"


def test_a_form_with_one_field_of_any_name_is_taken() -> None:
    assert payload({"picture": b"png"}) == b"png"


@pytest.mark.parametrize("item", [{}, {"a": b"1", "b": b"2"}, {"body": b""}, {"body": ""}])
def test_a_request_without_data_is_refused_and_the_field_named(item: dict[str, bytes]) -> None:
    with pytest.raises(BadInput, match="body"):
        payload(item)


def test_a_form_without_data_is_told_apart_and_the_header_named() -> None:
    for kind in ("application/x-www-form-urlencoded", "Application/X-WWW-Form-URLencoded; a=b"):
        with pytest.raises(BadInput, match=r"form .*Content-Type: application/json or text/plain"):
            payload({}, kind)
    with pytest.raises(BadInput, match="is missing"):
        payload({}, "text/plain")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_json_is_read_from_text_and_from_bytes(value: object) -> None:
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == parse_json(bytearray(text.encode()))


@given(st.binary())
def test_any_bytes_are_json_or_bad_input(data: bytes) -> None:
    try:
        parse_json(data)
    except BadInput as wrong:
        assert wrong.field == "body"


def test_json_nested_too_deeply_is_bad_input() -> None:
    with pytest.raises(BadInput):
        parse_json("[" * 100_000)


def test_one_bad_request_of_a_batch_fails_alone(tmp_path: Path) -> None:
    context = Context(tmp_path)
    bodies = answer(context, [{"a": 1}, BadInput("top_k", "must be a number"), {"b": 2}])
    assert context.statuses == {1: 400}
    assert set(context.content_types.values()) == {"application/json"}
    good, bad, other = answers(bodies)
    assert (good, other) == ({"a": 1}, {"b": 2})
    assert bad == {
        "code": 400,
        "type": "BadRequestException",
        "message": "top_k: must be a number",
    }
