"""Plans, and the counting of what comes of them."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve_loadtest.latency import histogram
from mmserve_loadtest.tally import NS, Outcome, Plan, Tally, merge, shares

URL = "http://127.0.0.1:1/"
PLAN = Plan(url=URL, warmup_s=1, duration_s=2)


def test_what_is_due_in_the_warm_up_is_not_counted() -> None:
    tally = Tally(PLAN, 0)
    tally.answered(200, due_ns=NS // 2, now_ns=NS // 2 + 1000)
    tally.answered(503, due_ns=NS // 2, now_ns=NS // 2 + 1000)
    tally.timed_out(NS // 2)
    tally.failed(NS // 2)
    outcome = tally.outcome(0)
    assert (outcome.statuses, outcome.failures, outcome.rate_per_s) == ({}, 0, 0)
    assert tally.replies == 2


def test_latencies_are_of_replies_below_400_and_the_rest_is_counted_apart() -> None:
    tally = Tally(PLAN, 0)
    tally.answered(200, due_ns=NS, now_ns=NS + 1_000_000)
    tally.answered(503, due_ns=NS, now_ns=NS + 9_000_000)
    tally.timed_out(NS)
    tally.failed(NS)
    outcome = tally.outcome(0)
    assert outcome.statuses == {200: 1, 503: 1}
    assert (outcome.timeouts, outcome.connection_errors, outcome.failures) == (1, 1, 3)
    assert outcome.latency_ms.max == pytest.approx(1, rel=0.001)
    assert outcome.rate_per_s == 0.5


def test_a_reply_after_the_end_has_a_latency_but_no_part_in_the_rate() -> None:
    tally = Tally(PLAN, 0)
    tally.answered(200, due_ns=2 * NS, now_ns=5 * NS)
    outcome = tally.outcome(0)
    assert outcome.rate_per_s == 0
    assert outcome.latency_ms.max == pytest.approx(3000, rel=0.001)


def test_a_run_that_ends_early_has_its_rate_over_the_time_it_took() -> None:
    tally = Tally(PLAN, 0)
    for number in range(10):
        tally.answered(200, due_ns=NS + number, now_ns=NS + number + 1)
    tally.end(NS + NS // 2)
    assert tally.outcome(0).rate_per_s == 20


@settings(max_examples=6, deadline=None)
@given(st.lists(st.lists(st.integers(1, 10**9), max_size=50), min_size=1, max_size=4))
def test_merged_outcomes_are_those_of_one_process_with_all_of_it(parts: list[list[int]]) -> None:
    def outcome(latencies_ns: list[int]) -> Outcome:
        tally = Tally(PLAN, 0)
        for latency_ns in latencies_ns:
            tally.answered(200, due_ns=NS, now_ns=NS + latency_ns)
        return tally.outcome(0.5)

    merged, whole = merge([outcome(part) for part in parts]), outcome(list(chain(*parts)))
    assert merged.statuses == whole.statuses
    assert merged.latency_ms == whole.latency_ms
    assert merged.rate_per_s == pytest.approx(whole.rate_per_s, abs=0.05)
    assert merged.generator_cpu == 0.5 * len(parts)


@given(st.integers(1, 9), st.integers(0, 60), st.floats(1, 1e5))
def test_processes_share_all_connections_and_the_whole_rate(
    processes: int, more: int, rate: float
) -> None:
    plan = Plan(url=URL, connections=processes + more, processes=processes, rate=rate)
    parts = list(shares(plan))
    assert len(parts) == processes
    assert sum(part.connections for part in parts) == plan.connections
    assert sum(part.rate or 0 for part in parts) == pytest.approx(rate)
    assert len({part.seed for part in parts}) == processes


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "nowhere"},
        {"connections": 0},
        {"processes": 2},
        {"rate": 0.0},
        {"duration_s": 0.0},
        {"arrivals": "bursts"},
    ],
)
def test_plans_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Plan(**({"url": URL} | wrong))


def test_an_empty_histogram_can_be_merged() -> None:
    assert histogram([]).get_total_count() == 0
    assert merge([Tally(PLAN, 0).outcome(0)]).latency_ms.max == 0
