from mmserve.metrics.requests import RequestCounters
from tests.metric_lines import parse_line


def test_each_reply_is_counted_in_its_class_with_the_time() -> None:
    counters = RequestCounters("vm")
    for status, name in ((200, "2XX"), (201, "2XX"), (404, "4XX"), (500, "5XX"), (302, "5XX")):
        assert counters.line(status, 1_700_000_000.9) == (
            f"Requests{name}.Count:1|#Level:Host|#hostname:vm,timestamp:1700000000"
        )


def test_the_time_follows_the_clock_also_when_it_is_set_back() -> None:
    counters = RequestCounters("vm")
    for now in (100.2, 100.9, 101.0, 99.5, 200.0):
        metric = parse_line(counters.line(200, now))
        assert metric is not None
        assert metric.timestamp == int(now)
