"""Two servers measured in turn, round after round, until the rounds agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from mmserve_loadtest.stats import LEAST_ROUNDS, Comparison, compare

MOST_ROUNDS = 15

#: Whose turn it is.
Side = Literal["ours", "theirs"]


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, and what it should come to.

    Attributes:
        key: in results.
        title: in tables.
        unit: of both servers' values.
        bar: for ours ÷ theirs.
        better: whether the ratio should be at least or at most `bar`.
    """

    key: str
    title: str
    unit: str
    bar: float
    better: Literal["higher", "lower"]

    def verdict(self, comparison: Comparison) -> Literal["met", "missed", "void"]:
        if comparison.is_void:
            return "void"
        is_met = (
            comparison.ratio >= self.bar
            if self.better == "higher"
            else comparison.ratio <= self.bar
        )
        return "met" if is_met else "missed"

    @property
    def bar_text(self) -> str:
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
        """There are too few, or they disagree and there may be more of them."""
        if self.count < self._least:
            return True
        return self.count < self._most and any(
            comparison.is_void for _, comparison in self.comparisons()
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
    while rounds.wants_more:
        number = rounds.count + 1
        # Who comes first changes, so that a drift of the machine harms both alike.
        order: tuple[Side, Side] = ("theirs", "ours") if number % 2 else ("ours", "theirs")
        values = {side: measure(side, number) for side in order}
        rounds.add(values["ours"], values["theirs"])
        after(rounds)
