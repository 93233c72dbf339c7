"""Servers in turn."""

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve_loadtest.rounds import OURS, Measure, Rounds, Side, measure_in_turn, take_turns

FASTER = Measure(key="rate", title="rate", unit="requests/s", bar=4, better="higher")
QUICKER = Measure(key="load", title="load", unit="s", bar=1 / 10, better="lower")


def fill(rounds: Rounds, ours: list[float], theirs: float) -> list[tuple[Side, int]]:
    """Runs rounds in which ours takes one value after another. Whose turn it was when."""
    turns: list[tuple[Side, int]] = []
    (measure,) = rounds.measures

    def one(side: Side, number: int) -> Mapping[str, float]:
        turns.append((side, number))
        return {measure.key: ours[(number - 1) % len(ours)] if side == "ours" else theirs}

    measure_in_turn(rounds, one)
    return turns


def test_rounds_that_agree_end_after_the_least_number() -> None:
    rounds = Rounds([FASTER], least=5, most=15)
    turns = fill(rounds, [50.0], 10.0)
    assert rounds.count == 5
    ((measure, comparison),) = rounds.comparisons()
    assert measure.verdict(comparison) == "met"
    assert turns[:4] == [("theirs", 1), ("ours", 1), ("ours", 2), ("theirs", 2)]


def test_rounds_that_disagree_go_on_to_the_most_and_are_void() -> None:
    rounds = Rounds([FASTER], least=5, most=8)
    fill(rounds, [10.0, 30.0, 90.0, 270.0], 10.0)
    assert rounds.count == 8
    ((measure, comparison),) = rounds.comparisons()
    assert measure.verdict(comparison) == "void"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.floats(1, 100))
def test_both_have_the_same_number_of_rounds(least: int, most: int, ours: float) -> None:
    rounds = Rounds([FASTER], least=least, most=most)
    turns = fill(rounds, [ours], 10.0)
    assert least <= rounds.count <= max(least, most)
    assert sum(side == "ours" for side, _ in turns) * 2 == len(turns)


def test_a_bar_below_one_is_met_from_below() -> None:
    for ours, verdict in ((0.4, "met"), (0.6, "missed")):
        rounds = Rounds([QUICKER])
        fill(rounds, [ours], 5.0)
        ((measure, comparison),) = rounds.comparisons()
        assert measure.verdict(comparison) == verdict
    assert QUICKER.bar_text == "≤ 1/10"
    assert QUICKER.ratio_text(0.05) == "1/20.0"
    assert FASTER.ratio_text(4.26) == "4.26 ×"


STATED = Measure(key="rate", title="rate", unit="requests/s", bar=None, better="higher")


def test_what_is_only_stated_adds_no_rounds() -> None:
    rounds = Rounds([STATED], least=5, most=8)
    fill(rounds, [10.0, 30.0, 90.0, 270.0], 10.0)
    assert rounds.count == 5
    steady = Rounds([STATED])
    fill(steady, [30.0], 10.0)
    ((measure, comparison),) = steady.comparisons()
    assert measure.verdict(comparison) == "stated"
    assert measure.bar_text == "none"


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.data())
def test_each_of_many_is_measured_once_a_round_and_each_comes_first_in_its_turn(
    others: int, least: int, data: st.DataObject
) -> None:
    against = {f"s{number}": Rounds([STATED], least=least) for number in range(others)}
    leaves = data.draw(st.none() | st.tuples(st.sampled_from(sorted(against)), st.integers(1, 9)))
    turns: list[tuple[int, str]] = []

    def one(name: str, number: int) -> Mapping[str, float] | None:
        turns.append((number, name))
        return None if leaves == (name, number) else {"rate": 1.0}

    names = {OURS, *against}
    take_turns(against, one)
    for number in range(1, 1 + max(number for number, _ in turns)):
        in_turn = [name for at, name in turns if at == number]
        gone = {leaves[0]} if leaves and leaves[1] < number else set[str]()
        assert sorted(in_turn) == sorted(names - gone)
    assert all(rounds.count == least for rounds in against.values())
    if leaves is None and least > others:
        firsts = {
            next(name for at, name in turns if at == number) for number in range(1, least + 1)
        }
        assert firsts == names
