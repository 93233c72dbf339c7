import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.metrics.lines import (
    HOST,
    from_worker,
    metric_line,
    worker_load_line,
)
from tests.metric_lines import Metric, parse_line

WORDS = st.from_regex(r"[A-Za-z0-9_]{1,12}", fullmatch=True)
PLAIN = st.text(
    st.characters(codec="utf-8", exclude_characters="|,#:", exclude_categories=("C", "Z")),
    min_size=1,
)
NUMBERS = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))


@given(
    WORDS,
    WORDS,
    NUMBERS,
    st.lists(st.tuples(WORDS, PLAIN), max_size=3),
    st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True),
    st.integers(0, 10**11),
    st.one_of(st.just(""), st.lists(st.uuids().map(str), min_size=1, max_size=3).map(",".join)),
)
def test_a_line_can_be_taken_apart_again(
    name: str,
    unit: str,
    value: float,
    dimensions: list[tuple[str, str]],
    host: str,
    timestamp: int,
    request_id: str,
) -> None:
    line = metric_line(
        name, value, unit, dimensions, hostname=host, timestamp=timestamp, request_id=request_id
    )
    assert parse_line(line) == Metric(
        name, unit, str(value), tuple(dimensions), host, timestamp, request_id
    )


@given(st.text(), st.text(), st.text(), st.lists(st.tuples(st.text(), st.text())), st.text())
def test_junk_cannot_break_out_of_its_field(
    name: str, value: str, unit: str, dimensions: list[tuple[str, str]], request_id: str
) -> None:
    line = metric_line(
        name, value, unit, dimensions, hostname="h", timestamp=1, request_id=request_id
    )
    assert len(line.splitlines()) == 1
    found = parse_line(line)
    assert found is not None
    assert found.timestamp == 1
    assert len(found.dimensions) == len(dimensions)


def test_the_lines_are_those_of_multi_model_server() -> None:
    line = metric_line("CPUUtilization", 4.2, "Percent", HOST, hostname="vm", timestamp=1796072419)
    assert line == "CPUUtilization.Percent:4.2|#Level:Host|#hostname:vm,timestamp:1796072419"
    line = metric_line(
        "Hits",
        2,
        "Count",
        [("ModelName", "m"), ("Level", "Model")],
        hostname="vm",
        timestamp=1796072424,
        request_id="8ce0ad85",
    )
    assert line == (
        "Hits.Count:2|#ModelName:m,Level:Model|#hostname:vm,requestID:8ce0ad85,timestamp:1796072424"
    )


def test_a_metric_without_a_unit_is_a_metric() -> None:
    line = metric_line(
        "LoadError", "disk full", None, [("Level", "Error")], hostname="h", timestamp=1
    )
    assert line == "LoadError.None:disk_full|#Level:Error|#hostname:h,timestamp:1"


@pytest.mark.parametrize(
    ("printed", "logged"),
    [
        (
            "[METRICS]Mine.Count:3|#A:b,C:d|#hostname:h,1700000000,rid",
            "Mine.Count:3|#A:b,C:d|#hostname:h,requestID:rid,timestamp:1700000000",
        ),
        (
            "[METRICS]PredictionTime.Milliseconds:0.28|#ModelName:m,Level:Model|#hostname:vm,"
            "1700000000,id1,id2",
            "PredictionTime.Milliseconds:0.28|#ModelName:m,Level:Model|#hostname:vm,"
            "requestID:id1,id2,timestamp:1700000000",
        ),
        (
            "[METRICS]A.B:-1e-05|#|#hostname:h,1",
            "A.B:-1e-05|#|#hostname:h,timestamp:1",
        ),
    ],
)
def test_what_a_worker_prints_is_logged_with_the_keys_named(printed: str, logged: str) -> None:
    assert from_worker(printed) == logged
    assert parse_line(logged) is not None


@pytest.mark.parametrize(
    "junk",
    [
        "[METRICS]",
        "[METRICS]nonsense",
        "[METRICS]two words.Count:1|#A:b|#hostname:h,1",
        "[METRICS]A.:1|#A:b|#hostname:h,1",
        "[METRICS]A.Count:nan|#A:b|#hostname:h,1",
        "[METRICS]A.Count:1|#A:b|#hostname:h,now",
        "[METRICS]A.Count:1|#A:b|#hostname:h,1,x\ny",
        "[METRICS]A.Count:1|#A:b\nc|#hostname:h,1",
        " [METRICS]A.Count:1|#A:b|#hostname:h,1",
        "A.Count:1|#A:b|#hostname:h,1",
    ],
)
def test_what_is_no_metric_is_none(junk: str) -> None:
    assert from_worker(junk) is None


@given(st.text())
def test_no_text_breaks_the_parsers(text: str) -> None:
    from_worker("[METRICS]" + text)
    parse_line(text)


def test_a_workers_load_is_told_in_milliseconds() -> None:
    line = worker_load_line("m" * 30, 9000, 0.1159, hostname="vm", timestamp=1796072419)
    assert line == f"W-9000-{'m' * 25}.ms:115|#Level:Host|#hostname:vm,timestamp:1796072419"
