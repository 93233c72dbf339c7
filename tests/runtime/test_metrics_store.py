"""`context.metrics` and the lines that become of it: quiet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.runtime.metrics_store import (
    Dimension,
    Metric,
    MetricEncoder,
    MetricsStore,
    Units,
    hostname,
)
from tests.metric_lines import parse_line

MODEL = (("ModelName", "m"), ("Level", "Model"))


@pytest.fixture
def store() -> MetricsStore:
    return MetricsStore({0: "a", 1: "b"}, "m")


def read(store: MetricsStore) -> list[tuple[str, str, str, str]]:
    """(name, unit, value, request id) of each line."""
    lines, _ = store.lines(1_700_000_000.9)
    metrics = [parse_line(line) for line in lines]
    assert None not in metrics
    return [(m.name, m.unit, m.value, m.request_id) for m in metrics if m is not None]


def test_every_call_makes_one_line_with_its_unit(store: MetricsStore) -> None:
    store.add_counter("Hits", 2, 0)
    store.add_time("Step", 12.5, 1)
    store.add_time("Long", 3, 0, "s")
    store.add_size("Blob", 3, 0)
    store.add_size("Small", 3, 0, unit="kB")
    store.add_percent("Load", 50)
    store.add_metric("Free", 7, 0, "Widgets")
    store.add_metric("Known", 7, 0, "ms")
    store.add_metric("Bare", 7)
    assert read(store) == [
        ("Hits", "Count", "2", "a"),
        ("Step", "Milliseconds", "12.5", "b"),
        ("Long", "Seconds", "3", "a"),
        ("Blob", "Megabytes", "3", "a"),
        ("Small", "Kilobytes", "3", "a"),
        ("Load", "Percent", "50", "a,b"),
        ("Free", "Widgets", "7", "a"),
        ("Known", "Milliseconds", "7", "a"),
        ("Bare", "unit", "7", "a,b"),
    ]


def test_a_line_is_what_the_log_shows(store: MetricsStore) -> None:
    store.add_counter("Hits", 2, 0)
    assert store.lines(1_700_000_000.9)[0] == [
        f"Hits.Count:2|#ModelName:m,Level:Model|#hostname:{hostname()},requestID:a,"
        "timestamp:1700000000"
    ]


def test_counters_add_up_and_the_rest_is_replaced(store: MetricsStore) -> None:
    for value in (1, 2, "3", 0.5):
        store.add_counter("Hits", value, 0)
        store.add_time("Step", value, 0)
    store.add_counter("Hits", 10)
    store.add_time("Step", 9, 0, "s")
    assert read(store) == [
        ("Hits", "Count", "6.5", "a"),
        ("Step", "Milliseconds", "0.5", "a"),
        ("Hits", "Count", "10", "a,b"),
        ("Step", "Seconds", "9", "a"),
    ]


def test_every_call_honours_dimensions_and_leaves_the_list_alone(store: MetricsStore) -> None:
    mine = [Dimension("k", "v")]
    store.add_counter("a", 1, 0, mine)
    store.add_time("b", 1, 0, "ms", mine)
    store.add_size("c", 1, 0, "MB", mine)
    store.add_percent("d", 1, 0, mine)
    store.add_metric("e", 1, 0, "x", mine)
    store.add_error("f", 1, mine)
    metrics = [parse_line(line) for line in store.lines(0)[0]]
    assert [m and m.dimensions for m in metrics] == [(("k", "v"), *MODEL)] * 5 + [
        (("k", "v"), ("Level", "Error"))
    ]
    assert len(mine) == 1
    store.add_counter("a", 1, 0)
    store.add_counter("a", 1, 0, [Dimension("k", "v")])
    assert [metric.value for metric in store.store if metric.name == "a"] == [2, 1]


def test_an_error_is_logged_with_its_number_or_its_text(store: MetricsStore) -> None:
    store.add_error("Failures", 3)
    store.add_error("Reason", "no | such, file")
    lines, junk = store.lines(0)
    assert [line.partition("|#hostname")[0] for line in lines] == [
        "Failures.Count:3|#Level:Error",
        "Reason.Count:1|#Error:no _ such_ file,Level:Error",
    ]
    assert junk == []


@pytest.mark.parametrize("call, unit", [("add_time", "h"), ("add_size", "TB")])
def test_a_wrong_unit_is_a_value_error(store: MetricsStore, call: str, unit: str) -> None:
    with pytest.raises(ValueError, match="unit"):
        getattr(store, call)("x", 1, 0, unit)


@pytest.mark.parametrize("value", ["words", None, float("nan"), float("inf"), object(), [], "_1"])
def test_a_value_that_is_no_number_gets_no_line_and_is_named(
    store: MetricsStore, value: object
) -> None:
    store.add_percent("Junk", value)
    store.add_counter("Junk", 1)
    store.add_counter("Junk", value)
    store.add_counter("After", 1)
    lines, junk = store.lines(0)
    assert [line.partition(".")[0] for line in lines] == ["After"]
    assert junk == ["Junk", "Junk"]


def test_whatever_lies_in_the_store_breaks_nothing(store: MetricsStore) -> None:
    store.store += [None, Metric("x", 1, "ms", [None]), Metric(5, 1, 7, [])]  # type: ignore[list-item, arg-type]
    store.add_counter("After", True)
    lines, junk = store.lines(0)
    assert [line.partition("|")[0] for line in lines] == ["After.Count:1"]
    assert junk == ["NoneType", "x", "5"]


@given(
    st.text(),
    st.one_of(st.integers(), st.floats(), st.text(), st.booleans()),
    st.text(min_size=1),
    st.text(),
    st.text(),
)
def test_any_name_unit_and_dimension_makes_a_line_that_can_be_read(
    name: str, value: Any, unit: str, key: str, text: str
) -> None:
    store = MetricsStore({0: "id"}, text)
    store.add_metric(name, value, 0, unit, [Dimension(key, text)])
    lines, junk = store.lines(0)
    assert len(lines) + len(junk) == 1
    for line in lines:
        assert parse_line(line) is not None, line


def test_metrics_and_units_look_as_in_multi_model_server() -> None:
    metric = Metric("n", 1, "ms", [Dimension("k", "v")], "rid", "counter")
    metric.update(5)
    assert str(metric).startswith(f"n.Milliseconds:6|#k:v|#hostname:{hostname()},")
    assert str(metric).endswith(",rid")
    made = json.loads(json.dumps([metric], cls=MetricEncoder))
    assert made[0].pop("Timestamp") > 1_600_000_000
    assert made == [
        {
            "MetricName": "n",
            "Value": 6,
            "Unit": "Milliseconds",
            "Dimensions": [{"Name": "k", "Value": "v"}],
            "HostName": hostname(),
            "RequestId": "rid",
        }
    ]
    with pytest.raises(TypeError):
        json.dumps(object(), cls=MetricEncoder)
    assert Units().units["kB"] == "Kilobytes"
