"""Latencies and their distribution. Values are whole nanoseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from hdrh.histogram import HdrHistogram

LONGEST_NS = 3_600_000_000_000  # an hour
DIGITS = 3  # significant decimal digits that the histogram keeps
_BITS = 11  # of them in binary: 2 * 10**3 < 2**11
PERCENTILES = (50.0, 90.0, 99.0, 99.9)


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in milliseconds; all zero when nothing was measured."""

    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    mean: float


def histogram(latencies_ns: Iterable[int]) -> HdrHistogram:
    """A histogram of three significant digits, from 1 ns to an hour.

    Recording goes through the bucket each value falls into, counted at C speed: one
    `record_value` a value takes five times as long.

    Source: HdrHistogram; with 2048 sub-buckets, values of more than 11 bits share a bucket when
    their 11 leading bits agree.
    """
    counts = Counter(map(_bucket, latencies_ns))
    recorded = HdrHistogram(1, LONGEST_NS, DIGITS)
    for value, count in counts.items():
        recorded.record_value(min(max(value, 1), LONGEST_NS), count)
    return recorded


def _bucket(value: int) -> int:
    """The smallest value of this value's bucket."""
    shift = value.bit_length() - _BITS
    return value >> shift << shift if shift > 0 else value


def summary(recorded: HdrHistogram) -> Latency:
    if not recorded.get_total_count():
        return Latency(p50=0, p90=0, p99=0, p999=0, max=0, mean=0)
    p50, p90, p99, p999 = (_ms(recorded.get_value_at_percentile(p)) for p in PERCENTILES)
    return Latency(
        p50=p50,
        p90=p90,
        p99=p99,
        p999=p999,
        max=_ms(recorded.get_max_value()),
        mean=_ms(recorded.get_mean_value()),
    )


def percentile_ms(latencies_ns: Iterable[int], percentile: float) -> float:
    """One percentile, exact to the histogram's precision. Zero when there are no latencies."""
    recorded = histogram(latencies_ns)
    if not recorded.get_total_count():
        return 0.0
    return _ms(recorded.get_value_at_percentile(percentile))


def _ms(value_ns: float) -> float:
    return round(value_ns / 1e6, 4)
