"""What rounds of two servers, measured in turn, say about their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

import msgspec

LEAST_ROUNDS = 5
CONFIDENCE = 0.90
VOID_BEYOND = 0.15


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Paired rounds of a measure.

    Attributes:
        ours: median of ours.
        theirs: median of theirs.
        ratio: median over the rounds of ours ÷ theirs.
        low: lower end of the 90 % interval of `ratio`.
        high: upper end.
        rounds: how many pairs.
    """

    ours: float
    theirs: float
    ratio: float
    low: float
    high: float
    rounds: int

    @property
    def is_void(self) -> bool:
        """The rounds disagree too much, or are too few, to say anything."""
        return self.rounds < LEAST_ROUNDS or (
            self.low < self.ratio * (1 - VOID_BEYOND) or self.high > self.ratio * (1 + VOID_BEYOND)
        )


def compare(ours: Sequence[float], theirs: Sequence[float]) -> Comparison:
    """Both in the order of the rounds; every value above zero.

    The ratio is taken within a round, where both met the same noise.

    Raises:
        ValueError: no rounds, unequal numbers of them, or a value that is not positive.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} rounds of ours and {len(theirs)} of theirs")
    if min(*ours, *theirs) <= 0:
        raise ValueError("a measured value is not above zero")
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    return Comparison(
        ours=median(ours),
        theirs=median(theirs),
        ratio=median(ratios),
        low=low,
        high=high,
        rounds=len(ratios),
    )


def median_interval(
    values: Sequence[float], *, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval that covers the median of whatever `values` were drawn from, this often.

    Nothing is assumed about that distribution, and nothing is drawn by chance: the ends lie
    between the k-th value from either side and the next. A bootstrap of so few rounds claims 90 %
    and covers 80. Of fewer than five values it is their range.

    Source: Hettmansperger and Sheather, Confidence intervals based on interpolated order
    statistics, Statistics & Probability Letters 4, 1986.
    """
    ordered, count = sorted(values), len(values)
    depth = max(
        (k for k in range(1, count // 2 + 1) if _coverage(count, k) >= confidence), default=0
    )
    if not depth:
        return ordered[0], ordered[-1]
    wider, narrower = _coverage(count, depth), _coverage(count, depth + 1)
    share = (wider - confidence) / (wider - narrower)
    inward = (count - depth) * share / (depth + (count - 2 * depth) * share)
    return (
        _between(ordered[depth - 1], ordered[depth], inward),
        _between(ordered[-depth], ordered[-depth - 1], inward),
    )


def _coverage(count: int, depth: int) -> float:
    """How often the k-th smallest and k-th largest of `count` draws have the median between."""
    outside: int = sum(comb(count, below) for below in range(depth))
    return 1 - outside / 2.0 ** (count - 1)


def _between(outer: float, inner: float, inward: float) -> float:
    return outer + (inner - outer) * inward
