"""The comparison itself, and the table: nothing here needs a server."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from mmserve_loadtest.http import Reply

from .allowed import ALLOWED, excuse
from .comparing import Difference, begin_alike, differences, normal
from .exchanges import Exchange
from .table import settings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def reply(status: int = 200, body: object = b"", reason: str = "OK", **headers: str) -> Reply:
    content = body if isinstance(body, bytes) else json.dumps(body, indent=2).encode()
    fields = {"content-length": str(len(content))} | headers
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{k}: {v}" for k, v in fields.items())]
    return Reply(status, False, "\r\n".join(lines).encode(), content)


def aspects(ours: Reply | str, theirs: Reply | str) -> list[str]:
    return [difference.aspect for difference in differences(ours, theirs)]


@given(JSON)
def test_a_reply_does_not_differ_from_itself(value: object) -> None:
    assert differences(reply(body=value), reply(body=value)) == []


@given(JSON, JSON)
def test_json_that_differs_is_told_apart(ours: object, theirs: object) -> None:
    found = differences(reply(body=ours), reply(body=theirs))
    assert bool(found) == (json.dumps(ours) != json.dumps(theirs))
    swapped = differences(reply(body=theirs), reply(body=ours))
    assert {(d.aspect, d.ours, d.theirs) for d in found if "!" not in d.aspect} == {
        (d.aspect, d.theirs, d.ours) for d in swapped if "!" not in d.aspect
    }


def test_status_reason_and_headers_are_aspects() -> None:
    assert aspects(reply(200), reply(404, reason="Not Found")) == ["status"]
    assert aspects(reply(reason=""), reply()) == ["reason"]
    assert aspects(reply(pragma="a", expires="1"), reply(pragma="b")) == [
        "header:expires",
        "header:pragma",
    ]
    assert aspects(reply(Pragma="a"), reply(pragma="a")) == []


def test_the_length_is_an_aspect_only_where_it_is_not_that_of_the_body() -> None:
    assert aspects(reply(body=b"abc"), reply(body=b"abcd")) == ["body"]
    wrong = Reply(200, False, b"HTTP/1.1 200 OK\r\ncontent-length: 9", b"abc")
    assert aspects(wrong, reply(body=b"abc")) == ["header:content-length"]


def test_order_layout_and_kind_of_json_are_aspects() -> None:
    assert aspects(reply(body={"a": 1, "b": 2}), reply(body={"b": 2, "a": 1})) == ["json:!order"]
    assert aspects(reply(body=b'{"a":1}'), reply(body={"a": 1})) == ["json!layout"]
    assert aspects(reply(body={"a": 1}), reply(body={"a": True})) == ["json:/a"]
    assert aspects(reply(body={"a": [1]}), reply(body={"a": [2], "b": 3})) == [
        "json:/a/0",
        "json:/b",
    ]


def test_ids_times_and_numbers_of_a_run_do_not_matter() -> None:
    def told(id: str, time: str, memory: int) -> Reply:
        worker = {"id": id, "startTime": time, "memoryUsage": memory}
        return reply(
            body={"workers": [worker]}, **{"x-request-id": "a" * 8 + "-0000-0000-0000-" + "b" * 12}
        )

    assert (
        aspects(
            told("9000-1a2b3c4d", "2024-05-20T10:00:00.123Z", 0),
            told("9031", "2025-01-01T00:00:00.000Z", 5_000_000),
        )
        == []
    )
    assert normal("/tmp/mmsb-x1_y/tmp/models/abc") == "<home>/tmp/models/abc"


def test_a_missing_reply_is_an_outcome() -> None:
    assert aspects("not HTTP", "not HTTP") == []
    assert differences(reply(503), "not HTTP") == [Difference("outcome", "reply 503", "not HTTP")]


def test_messages_may_end_in_words_of_ours_where_the_reference_says_so() -> None:
    assert begin_alike("Worker died. It was killed by signal 9.", "Worker died.")
    assert begin_alike(
        "No worker is available to serve request for model: m. The queue is full.",
        "No worker is available to serve request for model: m. Consider a larger queue.",
    )
    assert not begin_alike(
        "No worker is available to serve request for model: m.",
        "No worker is available to serve request for model: n.",
    )
    assert begin_alike(
        "Failed to download model from: http://a/b, code: 404 (Not Found)",
        "Failed to download model from: http://a/b, code: 404",
    )
    assert not begin_alike("Model name is not defined.", "Prediction failed")


def test_prose_of_an_api_description_is_not_compared_but_must_be_there() -> None:
    def described(**info: str) -> Reply:
        return reply(body={"openapi": "3.0.1", "info": info})

    assert aspects(described(description="Ours."), described(description="Theirs.")) == []
    assert aspects(described(), described(description="Theirs.")) == ["json:/info/description"]
    assert aspects(described(title="a"), described(title="b")) == ["json:/info/title"]


# ------------------------------------------------------------------------------ the table


def test_the_table_is_large_and_every_exchange_has_a_name_of_its_own() -> None:
    names = [
        (setting.name, script.name, step.name)
        for setting in settings()
        for script in setting.scripts
        for step in script.steps
        if isinstance(step, Exchange)
    ]
    assert len(names) >= 250
    assert len(set(names)) == len(names)


def test_every_allowed_difference_names_its_reason_and_its_aspects() -> None:
    for row in ALLOWED:
        assert re.fullmatch(r"D\d{1,2}|F\d{3}", row.reason)
        assert row.why
        for aspect in row.what.split("|"):
            assert aspect == "json:/*" or "*" not in aspect.removeprefix("json:/workers/*/")[:5], (
                row
            )


def test_what_is_not_in_the_table_is_not_excused() -> None:
    name = "plain / routes / inference GET /ping"
    assert excuse(name, Difference("status", "500", "200")) is None
    assert excuse(name, Difference("body", "a", "b")) is None
    row = excuse(name, Difference("reason", '"OK"', '""'))
    assert row is not None
    assert row.reason == "D23"
