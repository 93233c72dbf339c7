"""`overhead`: what a server costs, with a model that does nothing."""

from __future__ import annotations

from mmserve_loadtest.bench import (
    Options,
    both,
    exit_status,
    model_store,
    record,
    refuse_failures,
    verdict_table,
)
from mmserve_loadtest.load import run
from mmserve_loadtest.models import write_noop
from mmserve_loadtest.progress import Ticker
from mmserve_loadtest.results import Results, table
from mmserve_loadtest.rounds import Measure, Rounds, Side, measure_in_turn
from mmserve_loadtest.servers import Server, ServerFailed
from mmserve_loadtest.tally import Outcome, Plan

CONNECTIONS = (1, 16, 64)
BAR = 4.0
BODY = b"hello"
WARM_S = 8.0  # before the first round: the JVM compiles what it sees often
SETTLE_S = 0.5  # before each measurement
PAUSE_LIMIT_MS = 300.0  # of the generator itself; a busy server does not keep it that long
TRIES = 5


def overhead(
    options: Options,
    results: Results,
    ticker: Ticker,
    *,
    duration_s: float,
    warm_s: float = WARM_S,
) -> int:
    """Requests per second of `POST /predictions/noop`, one worker, closed loop.

    Returns:
        The exit status.
    """
    rounds = Rounds(
        [
            Measure(
                key=f"noop_{count}",
                title=f"no-op, {count} connection{'s' * (count > 1)}",
                unit="requests/s",
                bar=BAR,
                better="higher",
            )
            for count in CONNECTIONS
        ],
        least=options.rounds,
        most=options.most_rounds,
    )
    halfway: dict[tuple[Side, int], list[float]] = {}

    with model_store() as store, both(options, store, ticker) as pair:
        url = write_noop(store)
        for server in pair:
            server.manage("POST", f"/models?url={url}&initial_workers=1&synchronous=true")
            ticker.step(f"warming {server.subject.name}")
            for count in CONNECTIONS:
                run(_plan(server, count, warm_s / len(CONNECTIONS)), ticker.tell)

        def measure(side: Side, number: int) -> dict[str, float]:
            rates = {}
            for count in CONNECTIONS:
                server = pair[side]
                ticker.step(f"round {number}: {server.subject.name}, {count} connections")
                plan = _plan(server, count, duration_s)
                outcome = _measured(server, plan, ticker)
                results.add(
                    "load", server=server.subject.name, round=number, plan=plan, outcome=outcome
                )
                halfway.setdefault((side, count), []).append(outcome.latency_ms.p50)
                rates[f"noop_{count}"] = outcome.rate_per_s
            return rates

        measure_in_turn(rounds, measure)
        record(results, "overhead", rounds, pair)
    ticker.done()

    print(verdict_table(rounds, (options.ours.name, options.theirs.name)))
    print()
    rows = [
        (
            str(count),
            *(
                f"{sorted(times := halfway[side, count])[len(times) // 2]:.3f} ms"
                for side in ("ours", "theirs")
            ),
        )
        for count in CONNECTIONS
    ]
    print(
        table(
            rows, header=("connections", f"p50 {options.ours.name}", f"p50 {options.theirs.name}")
        )
    )
    return exit_status(rounds)


def _plan(server: Server, connections: int, duration_s: float) -> Plan:
    return Plan(
        url=f"{server.inference}/predictions/noop",
        body=BODY,
        connections=connections,
        duration_s=duration_s,
        warmup_s=SETTLE_S,
    )


def _measured(server: Server, plan: Plan, ticker: Ticker) -> Outcome:
    """What came of the plan, carried out again while the machine stands still in between."""
    for _ in range(TRIES):
        outcome = run(plan, ticker.tell)
        refuse_failures(server, outcome)
        if outcome.longest_pause_ms <= PAUSE_LIMIT_MS:
            return outcome
        ticker.say(f"the generator stood still for {outcome.longest_pause_ms:,.0f} ms; once more")
    raise ServerFailed(f"this machine stands still too often to measure {server.subject.name}")
