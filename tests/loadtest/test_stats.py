"""What paired rounds say about a ratio."""

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve_loadtest.stats import CONFIDENCE, Comparison, compare, median_interval

VALUES = st.floats(0.01, 1e6)
PAIRS = st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=12)


@given(PAIRS)
def test_the_interval_holds_the_ratio_and_lies_within_the_rounds(
    pairs: list[tuple[float, float]],
) -> None:
    ours, theirs = zip(*pairs, strict=True)
    found = compare(ours, theirs)
    ratios = [mine / other for mine, other in pairs]
    nearly = pytest.approx
    assert min(ratios) <= found.low or found.low == nearly(min(ratios))
    assert found.low <= found.ratio <= found.high or found.low == nearly(found.high)
    assert found.high <= max(ratios) or found.high == nearly(max(ratios))
    assert found.ratio == median(ratios)
    assert (found.ours, found.theirs, found.rounds) == (median(ours), median(theirs), len(pairs))


@given(PAIRS, st.randoms(use_true_random=False))
def test_the_order_of_the_rounds_does_not_matter(
    pairs: list[tuple[float, float]], chance: random.Random
) -> None:
    shuffled = list(pairs)
    chance.shuffle(shuffled)
    assert compare(*zip(*pairs, strict=True)) == compare(*zip(*shuffled, strict=True))


def test_rounds_that_agree_have_a_narrow_interval_and_rounds_that_do_not_are_void() -> None:
    assert not compare([40, 41, 42, 43, 44], [10, 10, 10, 10, 10]).is_void
    assert compare([40, 20, 60, 80, 10], [10, 10, 10, 10, 10]).is_void


def test_fewer_than_five_rounds_are_void_however_well_they_agree() -> None:
    assert compare([4.0] * 4, [1.0] * 4).is_void
    assert not compare([4.0] * 5, [1.0] * 5).is_void


@pytest.mark.parametrize(
    ("low", "high", "is_void"),
    [(1.71, 2.29, False), (1.69, 2.1, True), (1.9, 2.31, True)],
)
def test_an_interval_wider_than_15_percent_to_either_side_is_void(
    low: float, high: float, is_void: bool
) -> None:
    found = Comparison(ours=2, theirs=1, ratio=2, low=low, high=high, rounds=9)
    assert found.is_void is is_void


@pytest.mark.parametrize("rounds", [5, 6, 9, 15])
def test_the_interval_covers_the_true_median_as_often_as_it_says(rounds: int) -> None:
    chance = random.Random(3)
    draws = ([chance.lognormvariate(0, 0.2) for _ in range(rounds)] for _ in range(2000))
    covered = sum(low <= 1 <= high for low, high in map(median_interval, draws)) / 2000
    assert covered == pytest.approx(CONFIDENCE, abs=0.025)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], []), ([0.0], [1.0])])
def test_rounds_that_cannot_be_compared_are_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError):
        compare(ours, theirs)
