"""Distributions of latencies."""

from hdrh.histogram import HdrHistogram
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve_loadtest.latency import DIGITS, LONGEST_NS, histogram, percentile_ms, summary

LATENCIES = st.lists(st.integers(1, LONGEST_NS), min_size=1, max_size=100)


@settings(max_examples=40, deadline=None)
@given(LATENCIES)
def test_counting_by_bucket_records_what_recording_each_value_does(values: list[int]) -> None:
    one_by_one = HdrHistogram(1, LONGEST_NS, DIGITS)
    for value in values:
        one_by_one.record_value(value)
    counted = histogram(values)
    assert counted.get_total_count() == len(values)
    for percentile in (0, 10, 50, 90, 99, 99.9, 100):
        assert counted.get_value_at_percentile(percentile) == one_by_one.get_value_at_percentile(
            percentile
        )


@settings(max_examples=40, deadline=None)
@given(LATENCIES, st.sampled_from([50.0, 90.0, 99.0, 100.0]))
def test_percentiles_are_right_to_three_digits(values: list[int], percentile: float) -> None:
    ordered = sorted(values)
    # HdrHistogram takes the value of the nearest rank.
    exact = ordered[max(1, int(percentile * len(ordered) / 100 + 0.5)) - 1]
    told = histogram(values).get_value_at_percentile(percentile)
    assert exact <= told <= exact * 1.001 + 1


def test_nothing_measured_is_all_zero() -> None:
    assert summary(histogram([])).max == 0
    assert percentile_ms([], 99.0) == 0


def test_values_beyond_the_histogram_count_as_its_longest() -> None:
    assert summary(histogram([LONGEST_NS * 5])).max >= LONGEST_NS / 1e6
