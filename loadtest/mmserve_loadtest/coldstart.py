"""`coldstart`: from nothing to an answer, and what a model costs while it gets there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import msgspec

from mmserve_loadtest.bench import (
    Options,
    Pair,
    both,
    exit_status,
    model_store,
    record,
    refuse_failures,
    verdict_table,
)
from mmserve_loadtest.client import call
from mmserve_loadtest.load import generate_while, new_event_loop, run
from mmserve_loadtest.models import (
    BERT_REQUEST,
    JSON_TYPE,
    pack,
    renew,
    site_packages,
    write_bert,
)
from mmserve_loadtest.processes import private_dirty_bytes
from mmserve_loadtest.progress import Ticker
from mmserve_loadtest.results import Results, table
from mmserve_loadtest.rounds import Measure, Rounds, Side, measure_in_turn
from mmserve_loadtest.servers import Server, ServerFailed
from mmserve_loadtest.tally import Outcome, Plan
from mmserve_loadtest.warm_memory import WarmMemory

LOADS = (
    Measure(key="directory", title="directory", unit="s", bar=1 / 15, better="lower"),
    Measure(key="deflated", title=".mar, deflated, first", unit="s", bar=1 / 3.5, better="lower"),
    Measure(key="stored", title=".mar, stored, first", unit="s", bar=1 / 10, better="lower"),
    Measure(key="again", title=".mar, again", unit="s", bar=1 / 30, better="lower"),
)
MEMORY_BAR_MB = 60.0
PING_BAR_MS = 25.0
PING_LOADS = 10
PING_RATE = 400.0
IDLE_S = 2.0
PARTS = ("loads", "memory", "ping")
#: Memory that is there before each load: what either server unpacks and allocates for BERT-base.
WARM_BYTES = 1280 << 20


def coldstart(
    options: Options,
    results: Results,
    ticker: Ticker,
    *,
    parts: tuple[str, ...] = PARTS,
    ping_loads: int = PING_LOADS,
    small: bool = False,
) -> int:
    """The parts that are named, on one pair of servers.

    Args:
        ping_loads: how often the model is loaded while `/ping` is asked.
        small: a BERT of one layer, to try the command out.

    Returns:
        The exit status: 0 when every bar is met, 1 when one is missed, 3 when one is void.
    """
    # The libraries of this interpreter, for the workers of a server whose own has none.
    theirs = msgspec.structs.replace(
        options.theirs, env={**options.theirs.env, "PYTHONPATH": site_packages()}
    )
    options = msgspec.structs.replace(options, theirs=theirs)
    statuses = []
    with model_store() as store:
        ticker.step("writing BERT-base")
        url = write_bert(store, small=small)
        with both(options, store, ticker) as pair:
            for server in pair:
                ticker.step(f"first load, not counted: {server.subject.name}")
                _load(server, url)
                _unload(server)
            if "loads" in parts:
                warm_bytes = 0 if small else WARM_BYTES
                statuses.append(_loads(options, pair, store, results, ticker, warm_bytes))
            if "memory" in parts:
                statuses.append(_memory(pair, url, results, ticker))
            if "ping" in parts:
                statuses.append(_ping(pair, url, ping_loads, results, ticker))
    ticker.done()
    return next((status for status in (1, 3) if status in statuses), 0)


def _load(server: Server, url: str) -> float:
    """Registers with one worker and waits for it. Seconds that took."""
    begun = time.perf_counter()
    server.manage("POST", f"/models?url={url}&model_name=bert&initial_workers=1&synchronous=true")
    took_s = time.perf_counter() - begun
    _predict(server)
    return took_s


def _unload(server: Server, *, limit_s: float = 20.0) -> None:
    """Returns when the model's processes are gone.

    Multi Model Server answers earlier, and drops the connection of a registration that it gets
    while it still cleans up.
    """
    worker = _predict(server)
    server.manage("DELETE", "/models/bert")
    until = time.monotonic() + limit_s
    while worker in server.pids() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)


def _predict(server: Server) -> int:
    """One inference. The process that did it."""
    url = f"{server.inference}/predictions/bert"
    reply = call("POST", url, BERT_REQUEST, JSON_TYPE)
    if reply.status != 200:
        raise ServerFailed(f"{server.subject.name}: {reply.status} {reply.body[:500]!r}")
    return int(msgspec.json.decode(reply.body)["pid"])


# ------------------------------------------------------------------------------ loads


def _loads(
    options: Options, pair: Pair, store: Path, results: Results, ticker: Ticker, warm_bytes: int
) -> int:
    """Seconds of `POST /models`, synchronous, one worker, page cache warm."""
    for method in ("deflated", "stored"):
        ticker.step(f"packing bert-{method}.mar")
        pack(store / "bert", store / f"bert-{method}.mar", method)
    rounds = Rounds(LOADS, least=options.rounds, most=options.most_rounds)
    renewed = 0

    def measure(side: Side, number: int) -> Mapping[str, float]:
        nonlocal renewed
        if renewed < number:
            renewed = number
            for method in ("deflated", "stored"):
                renew(store / f"bert-{method}.mar", number)
        times = {}
        for key, url in (
            ("directory", "bert"),
            ("deflated", "bert-deflated.mar"),
            ("again", "bert-deflated.mar"),
            ("stored", "bert-stored.mar"),
        ):
            server = pair[side]
            ticker.step(f"round {number}: {server.subject.name} loads {url} ({key})")
            memory.lay_in(warm_bytes)
            times[key] = _load(server, url)
            _unload(server)
        return times

    with WarmMemory() as memory:
        measure_in_turn(rounds, measure)
    record(results, "coldstart", rounds, pair.versions)
    ticker.done()
    print("POST /models of BERT-base, synchronous, one worker, page cache warm\n")
    print(verdict_table(rounds, (pair.ours.subject.name, pair.theirs.subject.name)))
    print()
    return exit_status(rounds)


# ------------------------------------------------------------------------------ memory


def _memory(pair: Pair, url: str, results: Results, ticker: Ticker) -> int:
    """Private dirty memory that a second worker adds after one inference."""
    rows, ours_mb = [], 0.0
    for server in pair:
        ticker.step(f"second worker of {server.subject.name}")
        _load(server, url)
        first = _predict(server)
        before = _private_dirty_mb(server)
        server.manage("PUT", "/models/bert?min_worker=2&max_worker=2&synchronous=true")
        second = _other_worker(server, first)
        added_mb = _private_dirty_mb(server) - before
        own_mb = private_dirty_bytes(second) / 1e6
        _unload(server)
        counted_mb = max(added_mb, own_mb)
        results.add(
            "memory",
            server=server.subject.name,
            added_mb=added_mb,
            own_mb=own_mb,
            servers=pair.versions,
        )
        rows.append((server.subject.name, f"{added_mb:.0f} MB", f"{own_mb:.0f} MB"))
        if server is pair.ours:
            ours_mb = counted_mb
    verdict = "met" if ours_mb <= MEMORY_BAR_MB else "missed"
    ticker.done()
    print("Private dirty memory of a second worker of BERT-base, after one inference\n")
    print(table(rows, header=("server", "all its processes together grew by", "the worker has")))
    print(f"\nbar ≤ {MEMORY_BAR_MB:g} MB, the larger of the two: {verdict}\n")
    return 0 if verdict == "met" else 1


def _private_dirty_mb(server: Server) -> float:
    return sum(private_dirty_bytes(pid) for pid in server.pids()) / 1e6


def _other_worker(server: Server, first: int, *, limit_s: float = 60.0) -> int:
    """Sends two requests at a time until one is answered not by `first`. That worker's pid."""
    until = time.monotonic() + limit_s
    with ThreadPoolExecutor(2) as pool:
        while time.monotonic() < until:
            for pid in pool.map(lambda _: _predict(server), range(2)):
                if pid != first:
                    return pid
    raise ServerFailed(f"{server.subject.name}: the second worker never answered")


# ------------------------------------------------------------------------------ ping


def _pings(server: Server, duration_s: float) -> Plan:
    return Plan(
        url=f"{server.inference}/ping",
        method="GET",
        rate=PING_RATE,
        connections=4,
        duration_s=duration_s,
        warmup_s=0.2,
    )


def ping_while_loading(server: Server, url: str) -> float:
    """99th percentile in ms of the pings that were due between `POST /models` and its answer.

    Raises:
        ServerFailed: some were not answered, or with an error: no percentile would show it.
    """

    async def both() -> Outcome:
        plan = msgspec.structs.replace(_pings(server, 300.0), warmup_s=0)
        outcome, _ = await generate_while(plan, asyncio.to_thread(_load, server, url))
        return outcome

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        outcome = runner.run(both())
    refuse_failures(server, outcome)
    return outcome.latency_ms.p99


def _ping(pair: Pair, url: str, loads: int, results: Results, ticker: Ticker) -> int:
    """How much slower `/ping` answers while a model loads: open loop, 99th percentile."""
    idle: dict[str, list[float]] = {server.subject.name: [] for server in pair}
    loading: dict[str, list[float]] = {server.subject.name: [] for server in pair}
    for number in range(1, loads + 1):
        for server in pair:
            name = server.subject.name
            ticker.step(f"load {number} of {loads}: /ping of {name}")
            calm = run(_pings(server, IDLE_S))
            refuse_failures(server, calm)
            idle[name].append(calm.latency_ms.p99)
            loading[name].append(ping_while_loading(server, url))
            _unload(server)
    rows, excess_ms = [], {}
    for name in idle:
        excesses = [busy - calm for busy, calm in zip(loading[name], idle[name], strict=True)]
        excess_ms[name] = median(excesses)
        results.add(
            "ping",
            server=name,
            idle_p99_ms=idle[name],
            loading_p99_ms=loading[name],
            servers=pair.versions,
        )
        rows.append(
            (
                name,
                f"{median(idle[name]):.2f} ms",
                f"{median(loading[name]):.2f} ms",
                f"{excess_ms[name]:.2f} ms",
            )
        )
    verdict = "met" if excess_ms[pair.ours.subject.name] <= PING_BAR_MS else "missed"
    ticker.done()
    print(f"/ping, 99th percentile, {PING_RATE:g} a second, medians of {loads} loads\n")
    print(table(rows, header=("server", "idle", "while BERT-base loads", "difference")))
    print(f"\nbar ≤ {PING_BAR_MS:g} ms over idle: {verdict}\n")
    return 0 if verdict == "met" else 1
