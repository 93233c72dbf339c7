"""How an end is told, and which deaths are the out-of-memory killer's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.workers.exits import STRIKE_FRESH_S, Exit, OomKills


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (Exit(None), "How it ended is not known."),
        (Exit(0), "It exited with status 0."),
        (Exit(3), "It exited with status 3."),
        (Exit(-11), "It was killed by signal 11 (SIGSEGV)."),
        (Exit(-9), "It was killed by signal 9 (SIGKILL), probably out of memory."),
        (Exit(-9, True), "It was killed by signal 9 (SIGKILL): the kernel ran out of memory."),
        (Exit(-63), "It was killed by signal 63."),  # one without a name
    ],
)
def test_an_end_is_told_exactly(how: Exit, text: str) -> None:
    assert str(how) == text


def test_a_strike_that_comes_before_or_with_the_news_of_a_death_accounts_for_it() -> None:
    kills = OomKills(7)
    kills.look(7, 0.0)
    assert not kills.explain()
    kills.look(8, 1.0)
    assert kills.explain()
    kills.look(8, 1.1)
    assert not kills.explain()  # the same strike kills once


def test_an_old_strike_was_somebody_elses() -> None:
    kills = OomKills(0)
    kills.look(1, 10.0)
    kills.look(1, 10.0 + STRIKE_FRESH_S)
    assert not kills.explain()


@given(
    start=st.integers(0, 5),
    news=st.lists(st.tuples(st.integers(0, 9), st.floats(0, 3), st.booleans())),
)
def test_no_more_deaths_are_accounted_for_than_the_kernel_counted_strikes(
    start: int, news: list[tuple[int, float, bool]]
) -> None:
    kills, now, explained = OomKills(start), 0.0, 0
    for count, later_s, is_killed in news:  # where the counter cannot be read it is 0
        now += later_s
        kills.look(count, now)
        explained += is_killed and kills.explain()
    assert explained <= max([start, *(count for count, _, _ in news)]) - start
