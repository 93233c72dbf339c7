"""What rounds of two servers, measured in turn, say about their ratio."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

import msgspec

LEAST_ROUNDS = 5
CONFIDENCE = 0.90
VOID_BEYOND = 0.15
RESAMPLES = 10_000
_SEED = 20240520  # any; fixed, so that the same rounds always give the same interval


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

    The ratio is taken within a round, where both met the same noise, and the interval comes from
    resampling whole rounds.

    Raises:
        ValueError: no rounds, unequal numbers of them, or a value that is not positive.

    Source: percentile bootstrap; Efron, Bootstrap methods, Annals of Statistics 7, 1979.
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
    """Bootstrap interval of the median. The same values, in any order, give the same interval."""
    chance, ordered = random.Random(_SEED), sorted(values)
    medians = sorted(median(chance.choices(ordered, k=len(ordered))) for _ in range(RESAMPLES))
    tail = (1 - confidence) / 2
    return medians[int(tail * RESAMPLES)], medians[int((1 - tail) * RESAMPLES) - 1]
