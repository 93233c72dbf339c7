"""States of a worker and the pauses between its lives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.workers.life import (
    LONGEST_PAUSE_S,
    TRANSITIONS,
    Event,
    InvalidTransition,
    Life,
    Restarts,
    State,
)


@given(st.lists(st.sampled_from(Event)))
def test_a_life_follows_the_table_and_tells_its_story(events: list[Event]) -> None:
    life = Life()
    for event in events:
        if (life.state, event) in TRANSITIONS:
            assert (
                life.move(event)
                is TRANSITIONS[life.story[-2][1] if life.story[1:] else State.STARTING, event]
            )
        else:
            with pytest.raises(InvalidTransition, match=f"cannot take '{event.value}'"):
                life.move(event)
    assert life.was_ready == any(event is Event.LOADED for event, _ in life.story)


def test_a_stopped_worker_stays_so() -> None:
    life = Life()
    life.move(Event.EXITED)
    for event in Event:
        with pytest.raises(InvalidTransition):
            life.move(event)


def test_every_state_but_the_last_has_a_way_to_it() -> None:
    for state in State:
        assert (state is State.STOPPED) != ((state, Event.EXITED) in TRANSITIONS)


def test_pauses_between_failing_starts_grow_to_a_minute() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(was_used=False, ready_s=0) for _ in range(15)]
    assert pauses[:6] == [1, 1, 2, 3, 5, 8]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert pauses == sorted(pauses, key=lambda pause: pause or 0)


@pytest.mark.parametrize(("was_used", "ready_s"), [(True, 0.1), (False, 10.0)])
def test_a_worker_that_was_of_use_is_replaced_at_once(was_used: bool, ready_s: float) -> None:
    restarts = Restarts(limit=2)
    restarts.pause_s(was_used=False, ready_s=0)
    assert restarts.pause_s(was_used=was_used, ready_s=ready_s) == 0
    assert restarts.pause_s(was_used=False, ready_s=0) == 1


def test_a_worker_that_is_ready_only_for_a_moment_counts_as_failing() -> None:
    restarts = Restarts(limit=2)
    assert restarts.pause_s(was_used=False, ready_s=0.2) == 1
    assert restarts.pause_s(was_used=False, ready_s=0.2) == 1
    assert restarts.pause_s(was_used=False, ready_s=0.2) is None
