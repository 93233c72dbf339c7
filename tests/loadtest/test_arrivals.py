"""When requests of an open loop are due."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve_loadtest.arrivals import schedule

RATES = st.floats(0.5, 5000)
DURATIONS = st.floats(0.1, 2)


@given(RATES, DURATIONS)
def test_constant_arrivals_are_evenly_spaced(rate: float, duration_s: float) -> None:
    due = list(schedule("constant", rate, duration_s, 1))
    assert len(due) == int(rate * duration_s)
    assert all(at_s == pytest.approx(number / rate) for number, at_s in enumerate(due))


@given(RATES, DURATIONS, st.integers(0, 1000))
def test_poisson_arrivals_are_in_order_within_the_time_and_repeatable(
    rate: float, duration_s: float, seed: int
) -> None:
    due = list(schedule("poisson", rate, duration_s, seed))
    assert due == sorted(due)
    assert all(0 < at_s < duration_s for at_s in due)
    assert due == list(schedule("poisson", rate, duration_s, seed))


def test_poisson_arrivals_have_exponential_gaps() -> None:
    due = list(schedule("poisson", 1000, 20, 7))
    assert len(due) == pytest.approx(20_000, rel=0.03)
    gaps = [after - before for before, after in pairwise(due)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)  # of an exponential they are equal


def test_other_arrivals_are_refused() -> None:
    with pytest.raises(ValueError, match="constant, poisson"):
        schedule("bursts", 1, 1, 1)
