"""What the comparing commands share: both servers, the rounds, the table, the results."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from mmserve_loadtest.progress import Ticker
from mmserve_loadtest.results import Results, table
from mmserve_loadtest.rounds import MOST_ROUNDS, Rounds, Side
from mmserve_loadtest.servers import Server, ServerFailed, Started, Subject, running
from mmserve_loadtest.stats import LEAST_ROUNDS
from mmserve_loadtest.tally import Outcome


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Of every comparing command."""

    ours: Subject
    theirs: Subject
    rounds: int = LEAST_ROUNDS
    most_rounds: int = MOST_ROUNDS


class Pair:
    """Both servers, running side by side."""

    def __init__(self, ours: Server, theirs: Server) -> None:
        self.ours, self.theirs = ours, theirs

    def __getitem__(self, side: Side) -> Server:
        return self.ours if side == "ours" else self.theirs

    def __iter__(self) -> Iterator[Server]:
        yield from (self.theirs, self.ours)

    @property
    def versions(self) -> dict[str, str]:
        return {server.subject.name: server.subject.version for server in self}


@contextlib.contextmanager
def both(options: Options, store: Path, ticker: Ticker) -> Iterator[Pair]:
    """Starts both, as shipped: nothing is set but addresses and folders."""
    ticker.step(f"starting {options.theirs.name} {options.theirs.version}")
    with running(options.theirs, store) as theirs:
        ticker.step(f"starting {options.ours.name} {options.ours.version}")
        with running(options.ours, store) as ours:
            yield Pair(ours, theirs)


@contextlib.contextmanager
def model_store() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mmserve-bench-store-") as folder:
        yield Path(folder)


def verdict_table(rounds: Rounds, names: tuple[str, str]) -> str:
    """One row a measure: both medians, the ratio, its interval, the bar, the verdict."""
    ours, theirs = names
    rows = []
    for measure, comparison in rounds.comparisons():
        ends = sorted(
            (comparison.low, comparison.high), reverse=measure.better == "lower"
        )  # 1/x reads upwards
        rows.append(
            (
                measure.title,
                f"{comparison.ours:,.4g} {measure.unit}",
                f"{comparison.theirs:,.4g} {measure.unit}",
                measure.ratio_text(comparison.ratio),
                " to ".join(measure.ratio_text(end) for end in ends),
                measure.bar_text,
                measure.verdict(comparison),
            )
        )
    return table(rows, header=("measure", ours, theirs, "ratio", "90 % interval", "bar", "verdict"))


def record(results: Results, kind: str, rounds: Rounds, versions: Mapping[str, str]) -> None:
    for measure, comparison in rounds.comparisons():
        results.add(
            kind,
            measure=measure,
            comparison=comparison,
            verdict=measure.verdict(comparison),
            ours=rounds.ours[measure.key],
            theirs=rounds.theirs[measure.key],
            servers=versions,
        )


def exit_status(rounds: Rounds) -> int:
    """0 when every bar is met, 1 when one is missed, 3 when one is void; without a bar 0."""
    verdicts = {
        measure.verdict(comparison)
        for measure, comparison in rounds.comparisons()
        if measure.bar is not None
    }
    return 1 if "missed" in verdicts else 3 if "void" in verdicts else 0


def refuse_failures(server: Started, outcome: Outcome) -> None:
    """Raises ServerFailed when a request had no good reply: what failed took no time."""
    if outcome.failures:
        raise ServerFailed(
            f"{server.name} failed {outcome.failures} requests: statuses "
            f"{outcome.statuses}, {outcome.timeouts} timeouts, "
            f"{outcome.connection_errors} connection errors"
        )
