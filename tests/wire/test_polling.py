"""How long a wait is stayed awake for, by how the last ones went."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mmserve.wire.polling import MOST_CREDIT, MOST_SKIPPED, RETRY_CREDIT, Polling


def tries(polling: Polling, outcomes: list[bool]) -> int:
    """Waits that were stayed awake for, of those that would have ended so."""
    count = 0
    for comes_at_once in outcomes:
        if polling.is_worthwhile():
            count += 1
            polling.ended(was_at_once=comes_at_once)
    return count


def test_what_always_comes_at_once_is_always_worth_it() -> None:
    assert tries(Polling(), [True] * 1000) == 1000


def test_what_never_comes_is_tried_less_and_less() -> None:
    assert (
        tries(Polling(), [False] * 10_000)
        < (RETRY_CREDIT + 1) * (10_000 / MOST_SKIPPED + 10) + MOST_CREDIT
    )


def test_a_few_late_answers_among_many_cost_no_more_than_themselves() -> None:
    mostly = ([True] * 9 + [False]) * 20
    assert tries(Polling(), mostly) == len(mostly)


def test_what_is_late_more_often_than_not_is_given_up() -> None:
    rarely = [True, *[False] * 20] * 500
    assert tries(Polling(), rarely) < len(rarely) / 2


@given(st.lists(st.booleans(), max_size=300))
def test_after_any_past_it_finds_out_that_things_come_again(past: list[bool]) -> None:
    polling = Polling()
    tries(polling, past)
    tries(polling, [True] * (MOST_SKIPPED + 1))
    assert tries(polling, [True] * 50) == 50
