import json
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest
from mmserve.frontend.registration import (
    MAX_JSON,
    asked_by_json,
    asked_by_query,
    asked_page,
    asked_workers,
)
from mmserve.models.port import Registration


def by_json(**fields: Any) -> Registration:
    return asked_by_json(json.dumps(fields).encode())


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_texts_come_through_both_ways(text: str) -> None:
    asked = {"url": text, "model_name": text, "handler": text}
    expected = Registration(url=text, model_name=text, handler=text)
    assert asked_by_query(urlencode(asked)) == by_json(**asked) == expected


@given(st.integers(-(2**31), 2**31 - 1))
def test_numbers_come_through_both_ways(number: int) -> None:
    asked = {"url": "m", "batch_size": number, "max_batch_delay": number}
    expected = Registration(url="m", batch_size=number, max_batch_delay_ms=number)
    assert asked_by_query(urlencode(asked)) == by_json(**asked) == expected


@given(st.binary())
def test_any_body_is_a_registration_or_the_clients_mistake(body: bytes) -> None:
    for candidate in (body, b"{url:m," + body + b"}"):
        try:
            asked_by_json(candidate)
        except BadRequest as error:
            assert str(error).endswith(".")


def test_what_is_not_named_has_its_default() -> None:
    expected = Registration(url="m")
    assert expected.synchronous is True
    assert expected.max_batch_delay_ms is expected.initial_workers is None
    assert asked_by_query("url=m") == by_json(url="m") == expected
    assert asked_by_query("url=m&model_name=&handler=") == expected
    assert by_json(url="m", model_name=None, handler="", batch_size=None) == expected
    assert by_json(url="m", something={"else": [1]}) == expected


def test_the_first_of_a_repeated_name_counts_in_a_query_and_the_last_in_json() -> None:
    assert asked_by_query("url=a&url=b").url == "a"
    assert asked_by_json(b'{"url": "a", "url": "b"}').url == "b"


def test_model_url_stands_in_for_a_missing_url() -> None:
    assert asked_by_query("model_url=m").url == "m"
    assert by_json(model_url="m").url == "m"
    assert by_json(model_url="m", url="n").url == "n"


@pytest.mark.parametrize("query", ["", "url=", "url", "model_name=m", "url=&model_url=m"])
def test_a_url_is_required(query: str) -> None:
    with pytest.raises(BadRequest, match=r"^Parameter url is required\.$"):
        asked_by_query(query)


@pytest.mark.parametrize("runtime", ["PYTHON", "", "python4", "java"])
def test_an_unknown_runtime_is_refused(runtime: str) -> None:
    why = f"^Invalid RuntimeType value: {runtime}$"
    with pytest.raises(BadRequest, match=why):
        asked_by_query(f"url=m&runtime={runtime}")
    with pytest.raises(BadRequest, match=why):
        by_json(url="m", runtime=runtime)


@pytest.mark.parametrize("text", ["x", "%205", "5%20", "+5", "5.0", "1_0", "0x5", "", "2147483648"])
def test_a_number_that_cannot_be_read_in_a_query_is_not_given(text: str) -> None:
    names = ("batch_size", "max_batch_delay", "initial_workers", "response_timeout")
    query = "&".join(f"{name}={text}" for name in names)
    assert asked_by_query(f"url=m&{query}") == Registration(url="m")


@pytest.mark.parametrize(
    ("value", "number"), [("4", 4), (4.0, 4), (" 4", 4), (1e1, 10), (-3, -3), ("007", 7)]
)
def test_a_number_in_json_may_be_written_in_ways(value: object, number: int) -> None:
    assert by_json(url="m", batch_size=value).batch_size == number


@pytest.mark.parametrize("value", ["x", 4.5, True, 99999999999, "0x10", "", [], {}, "1e400"])
def test_a_number_that_cannot_be_read_in_json_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="batch_size must be an integer"):
        by_json(url="m", batch_size=value)
    with pytest.raises(BadRequest, match="initial_workers must be an integer"):
        asked_by_json(b"{url: m, initial_workers: 1e400}")


@pytest.mark.parametrize(
    ("value", "is_synchronous"),
    [("TRUE", True), ("true", True), ("no", False), ("yes", False), (False, False), (None, True)],
)
def test_synchronous_is_true_only_when_it_says_so(value: Any, is_synchronous: bool) -> None:
    assert by_json(url="m", synchronous=value).synchronous is is_synchronous
    if isinstance(value, str):
        assert asked_by_query(f"url=m&synchronous={value}").synchronous is is_synchronous
    assert asked_by_query("url=m&synchronous=").synchronous is False


@pytest.mark.parametrize("field", ["synchronous", "url", "preload_model"])
def test_a_list_is_no_value_in_json(field: str) -> None:
    with pytest.raises(BadRequest, match=f"Parameter {field} must be"):
        by_json(**{"url": "m", field: ["x"]})


def test_a_response_timeout_is_minutes_in_a_query_and_seconds_in_json() -> None:
    assert asked_by_query("url=m&response_timeout=2").response_timeout_s == 120
    assert by_json(url="m", response_timeout=2).response_timeout_s == 2
    assert by_json(url="m", response_timeout=0).response_timeout_s == 0
    assert asked_by_query("url=m&response_timeout=-1").response_timeout_s is None
    assert by_json(url="m", response_timeout=-1).response_timeout_s is None


def test_fewer_than_no_workers_are_no_workers() -> None:
    assert asked_by_query("url=m&initial_workers=-3").initial_workers == 0


def test_more_workers_than_any_machine_has_are_refused() -> None:
    why = "Parameter {} must be at most 10000"
    with pytest.raises(BadRequest, match=why.format("initial_workers")):
        asked_by_query("url=m&initial_workers=2147483647")
    with pytest.raises(BadRequest, match=why.format("initial_workers")):
        by_json(url="m", initial_workers=10_001)
    with pytest.raises(BadRequest, match=why.format("min_worker")):
        asked_workers("min_worker=10001")
    assert asked_workers("min_worker=1&max_worker=2147483647")[:2] == (1, 2147483647)
    assert by_json(url="m", initial_workers=10_000).initial_workers == 10_000


@pytest.mark.parametrize("text", ["yes", "TRUE", "y", "1", "no", "False", "N", "0"])
def test_preload_model_knows_yes_and_no(text: str) -> None:
    expected = text.lower() in ("yes", "true", "y", "1")
    assert asked_by_query(f"url=m&preload_model={text}").preload_model is expected
    assert by_json(url="m", preload_model=text).preload_model is expected


@pytest.mark.parametrize("text", ["", "maybe", "on", "2"])
def test_preload_model_refuses_the_rest(text: str) -> None:
    with pytest.raises(BadRequest, match="preload_model must be one of"):
        asked_by_query(f"url=m&preload_model={text}")


def test_json_may_hold_numbers_and_words_where_texts_are_wanted() -> None:
    asked = by_json(url=5, model_name=True, preload_model=True)
    assert (asked.url, asked.model_name, asked.preload_model) == ("5", "true", True)


@pytest.mark.parametrize("name", ["a%00b", "a%0Ab", "%1b[31m", "a%C2%85b"])
def test_control_characters_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="model_name must not contain control characters"):
        asked_by_query(f"url=m&model_name={name}")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "Malformed JSON: .* line 1, column 1"),
        (b"{bad", "Malformed JSON: .* line 1, column 5"),
        (b"\xff\xfe", "not UTF-8, at byte 0"),
        (b"[]", "must be an object"),
        (b'"x"', "must be an object"),
        (b"null", "must be an object"),
        (b"{}", "Parameter url is required"),
        (b"{url: m, x: '" + b"y" * MAX_JSON + b"'}", f"at most {MAX_JSON} bytes"),
    ],
)
def test_json_that_is_none_is_the_clients_mistake(body: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        asked_by_json(body)


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("", (1, 1, False)),
        ("min_worker=3", (3, 3, False)),
        ("min_worker=1&max_worker=2&synchronous=TRUE", (1, 2, True)),
        ("min_worker=x&synchronous=1&number_gpu=2&timeout=-1", (1, 1, False)),
        ("min_worker=0", (0, 0, False)),
    ],
)
def test_a_scaling_has_its_defaults(query: str, asked: tuple[int, int, bool]) -> None:
    assert asked_workers(query) == asked


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("min_worker=2&max_worker=1", r"^max_worker cannot be less than min_worker\.$"),
        ("max_worker=0", r"^max_worker cannot be less than min_worker\.$"),
        ("min_worker=-1", "negative"),
        ("min_worker=-2&max_worker=4", "negative"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused(query: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        asked_workers(query)


def test_a_page_has_its_defaults() -> None:
    assert asked_page("") == asked_page("limit=x&next_page_token=y") == (100, 0)
    assert asked_page("limit=0&next_page_token=7") == (0, 7)
