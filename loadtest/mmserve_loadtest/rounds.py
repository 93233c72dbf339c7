"""Servers measured in turn, round after round, until the rounds agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from mmserve_loadtest.stats import LEAST_ROUNDS, Comparison, compare

MOST_ROUNDS = 15

#: Whose turn it is, of two.
Side = Literal["ours", "theirs"]
#: Among any number of servers, the name of ours.
OURS = "ours"


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and what it should come to.

    Attributes:
        key: in results.
        title: in tables.
        unit: of both servers' values.
        bar: for ours ÷ theirs; None where the ratio is only stated.
        better: whether the ratio should be at least or at most `bar`.
    """

    key: str
    title: str
    unit: str
    bar: float | None
    better: Literal["higher", "lower"]

    def verdict(self, comparison: Comparison) -> Literal["met", "missed", "void", "stated"]:
        if comparison.is_void:
            return "void"
        if self.bar is None:
            return "stated"
        is_met = (
            comparison.ratio >= self.bar
            if self.better == "higher"
            else comparison.ratio <= self.bar
        )
        return "met" if is_met else "missed"

    @property
    def bar_text(self) -> str:
        if self.bar is None:
            return "none"
        return f"≥ {self.bar:g} ×" if self.better == "higher" else f"≤ 1/{1 / self.bar:.3g}"

    def ratio_text(self, value: float) -> str:
        """A ratio as the bar spells it."""
        return f"{value:.2f} ×" if self.better == "higher" else f"1/{1 / value:.1f}"


class Rounds:
    """The values of paired rounds. Knows when there are enough of them.

    Args:
        least: rounds at least.
        most: rounds at most, however much they disagree.
    """

    def __init__(
        self, measures: Sequence[Measure], *, least: int = LEAST_ROUNDS, most: int = MOST_ROUNDS
    ) -> None:
        self.measures = tuple(measures)
        self._least, self._most = least, max(least, most)
        self.ours: dict[str, list[float]] = {measure.key: [] for measure in measures}
        self.theirs: dict[str, list[float]] = {measure.key: [] for measure in measures}

    @property
    def count(self) -> int:
        return min((len(values) for values in self.theirs.values()), default=0)

    def add(self, ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
        """One round; a value for every measure, from both."""
        for measure in self.measures:
            self.ours[measure.key].append(ours[measure.key])
            self.theirs[measure.key].append(theirs[measure.key])

    @property
    def wants_more(self) -> bool:
        """There are too few, or they disagree about a bar and there may be more of them."""
        if self.count < self._least:
            return True
        return self.count < self._most and any(
            comparison.is_void
            for measure, comparison in self.comparisons()
            if measure.bar is not None
        )

    def comparisons(self) -> Iterator[tuple[Measure, Comparison]]:
        for measure in self.measures:
            yield measure, compare(self.ours[measure.key], self.theirs[measure.key])


def measure_in_turn(
    rounds: Rounds,
    measure: Callable[[Side, int], Mapping[str, float]],
    *,
    after: Callable[[Rounds], None] = lambda _: None,
) -> None:
    """Fills `rounds`.

    Args:
        measure: called with whose turn it is and the number of the round, from 1; gives a value
            for every measure.
        after: called after each round.
    """
    take_turns(
        {"theirs": rounds},
        lambda name, number: measure("ours" if name == OURS else "theirs", number),
        after=lambda: after(rounds),
    )


def take_turns(
    against: dict[str, Rounds],
    measure: Callable[[str, int], Mapping[str, float] | None],
    *,
    after: Callable[[], None] = lambda: None,
) -> None:
    """Fills the rounds of ours against each of some others; ours is measured once a round.

    Args:
        against: by the name of the other. One that gave no values is taken out.
        measure: called with whose turn it is, `OURS` or a key of `against`, and the number of the
            round, from 1; gives a value for every measure, or None where there will be none.
        after: called after each round.
    """
    number = 0
    while any(rounds.wants_more for rounds in against.values()):
        names = [*against, OURS]
        # Who comes first changes, so that a drift of the machine harms all alike.
        first, number = number % len(names), number + 1
        values = {name: measure(name, number) for name in (*names[first:], *names[:first])}
        ours = values[OURS]
        if ours is None:
            raise ValueError("there are no values of ours")
        for name in list(against):
            if (theirs := values[name]) is None:
                del against[name]
            else:
                against[name].add(ours, theirs)
        after()
