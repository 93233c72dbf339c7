"""`overhead`: what a server costs, with a model that does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mmserve_loadtest.bench import (
    exit_status,
    model_store,
    record,
    refuse_failures,
    verdict_table,
)
from mmserve_loadtest.load import run
from mmserve_loadtest.models import write_noop
from mmserve_loadtest.peer_servers import PeerMissing, PeerServer, install, running_peer
from mmserve_loadtest.peers import Peer, Request, noop
from mmserve_loadtest.progress import Ticker
from mmserve_loadtest.results import Results, table
from mmserve_loadtest.rounds import OURS, Measure, Rounds, take_turns
from mmserve_loadtest.servers import ServerFailed, Started, Subject, running
from mmserve_loadtest.tally import Outcome, Plan

CONNECTIONS = (1, 16, 64)
BAR = 4.0
BODY = b"hello"
WARM_S = 8.0  # before the first round: the JVM compiles what it sees often
SETTLE_S = 0.5  # before each measurement
PAUSE_LIMIT_MS = 300.0  # of the generator itself; a busy server does not keep it that long
TRIES = 5


class _Entrant(msgspec.Struct, frozen=True):
    """A running server that has the model, and the request that asks it."""

    server: Started
    url: str
    request: Request

    def plan(self, connections: int, duration_s: float) -> Plan:
        return Plan(
            url=self.url + self.request.path,
            body=self.request.body,
            headers=self.request.headers,
            connections=connections,
            duration_s=duration_s,
            warmup_s=SETTLE_S,
        )


def overhead(
    ours: Subject,
    against: Sequence[Subject | Peer],
    results: Results,
    ticker: Ticker,
    *,
    peers: Path,
    rounds: int,
    most_rounds: int,
    duration_s: float,
    warm_s: float = WARM_S,
) -> int:
    """Requests per second of a model that does nothing, one worker, closed loop.

    All servers run at the same time and are measured in turn, ours once a round.

    Args:
        against: Multi Model Server, for which there is a bar, and peers, which are left out where
            they cannot be installed, started or measured.
        peers: the folder with a virtual environment for each peer.

    Returns:
        The exit status, which the peers have no part in.
    """
    entrants: dict[str, _Entrant] = {}
    compared: dict[str, Rounds] = {}
    left_out: dict[str, str] = {}
    halfway: dict[tuple[str, int], list[float]] = {}

    def leave_out(name: str, reason: Exception) -> None:
        left_out[name] = str(reason)
        output = reason.output if isinstance(reason, PeerMissing) else ""
        results.add("left out", server=name, reason=str(reason), output=output)
        ticker.say(f"{name} is left out: {reason}")

    with model_store() as store, contextlib.ExitStack() as started:
        for other in against:
            if isinstance(other, Peer):
                try:
                    entrants[other.title] = _start_peer(other, peers, started, ticker)
                except PeerMissing as missing:
                    leave_out(other.title, missing)
            else:
                entrants[other.name] = _start(other, store, started, ticker)
        entrants[OURS] = _start(ours, store, started, ticker)
        for name, entrant in list(entrants.items()):
            ticker.step(f"warming {entrant.server.name}")
            try:
                for count in CONNECTIONS:
                    outcome = run(entrant.plan(count, warm_s / len(CONNECTIONS)), ticker.tell)
                    refuse_failures(entrant.server, outcome)
            except ServerFailed as failed:
                if not isinstance(entrant.server, PeerServer):
                    raise
                leave_out(name, failed)
                del entrants[name]
            if name in entrants and name != OURS:
                is_peer = isinstance(entrant.server, PeerServer)
                compared[name] = _rounds(None if is_peer else BAR, rounds, most_rounds)

        def measure(name: str, number: int) -> dict[str, float] | None:
            entrant, rates = entrants[name], {}
            for count in CONNECTIONS:
                ticker.step(f"round {number}: {entrant.server.name}, {count} connections")
                plan = entrant.plan(count, duration_s)
                try:
                    outcome = _measured(entrant.server, plan, ticker)
                except ServerFailed as failed:
                    if not isinstance(entrant.server, PeerServer):
                        raise
                    leave_out(name, failed)
                    return None
                results.add(
                    "load", server=entrant.server.name, round=number, plan=plan, outcome=outcome
                )
                halfway.setdefault((name, count), []).append(outcome.latency_ms.p50)
                rates[f"noop_{count}"] = outcome.rate_per_s
            return rates

        take_turns(compared, measure)
        for name, filled in compared.items():
            servers = [entrants[OURS].server, entrants[name].server]
            record(results, "overhead", filled, {each.name: each.version for each in servers})
    ticker.done()

    for name, filled in compared.items():
        print(verdict_table(filled, (ours.name, name)), end="\n\n")
    if compared:
        print(_halfway_table(halfway, {OURS: ours.name} | {name: name for name in compared}))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")
    return max((exit_status(filled) for filled in compared.values()), default=0)


def _start(
    subject: Subject, store: Path, started: contextlib.ExitStack, ticker: Ticker
) -> _Entrant:
    """Ours or Multi Model Server, with the model registered."""
    ticker.step(f"starting {subject.name} {subject.version}")
    server = started.enter_context(running(subject, store))
    url = write_noop(store)
    server.manage("POST", f"/models?url={url}&initial_workers=1&synchronous=true")
    return _Entrant(server, server.inference, Request(path="/predictions/noop", body=BODY))


def _start_peer(
    peer: Peer, folder: Path, started: contextlib.ExitStack, ticker: Ticker
) -> _Entrant:
    """Raises PeerMissing."""
    venv = install(peer, folder, ticker.step)
    ticker.step(f"starting {peer.title}")
    server = started.enter_context(running_peer(peer, venv, noop(BODY)))
    return _Entrant(server, server.url, server.request)


def _rounds(bar: float | None, least: int, most: int) -> Rounds:
    return Rounds(
        [
            Measure(
                key=f"noop_{count}",
                title=f"no-op, {count} connection{'s' * (count > 1)}",
                unit="requests/s",
                bar=bar,
                better="higher",
            )
            for count in CONNECTIONS
        ],
        least=least,
        most=most,
    )


def _halfway_table(halfway: dict[tuple[str, int], list[float]], names: dict[str, str]) -> str:
    rows = [
        (
            str(count),
            *(f"{sorted(times := halfway[name, count])[len(times) // 2]:.3f} ms" for name in names),
        )
        for count in CONNECTIONS
    ]
    return table(rows, header=("connections", *(f"p50 {title}" for title in names.values())))


def _measured(server: Started, plan: Plan, ticker: Ticker) -> Outcome:
    """What came of the plan, carried out again while the machine stands still in between."""
    for _ in range(TRIES):
        outcome = run(plan, ticker.tell)
        refuse_failures(server, outcome)
        if outcome.longest_pause_ms <= PAUSE_LIMIT_MS:
            return outcome
        ticker.say(f"the generator stood still for {outcome.longest_pause_ms:,.0f} ms; once more")
    raise ServerFailed(f"this machine stands still too often to measure {server.name}")
