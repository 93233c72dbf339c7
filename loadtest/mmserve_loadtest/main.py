"""`mmserve-bench`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

try:
    from mmserve_loadtest.arrivals import ARRIVALS
    from mmserve_loadtest.bench import Options
    from mmserve_loadtest.coldstart import PARTS, PING_LOADS, coldstart
    from mmserve_loadtest.load import run
    from mmserve_loadtest.models import ModelsMissing
    from mmserve_loadtest.overhead import WARM_S, overhead
    from mmserve_loadtest.peers import PEERS, Peer
    from mmserve_loadtest.progress import Ticker
    from mmserve_loadtest.results import Results, table
    from mmserve_loadtest.rounds import MOST_ROUNDS
    from mmserve_loadtest.servers import ServerFailed, Subject, mms, mmserve
    from mmserve_loadtest.stats import LEAST_ROUNDS
    from mmserve_loadtest.tally import Outcome, Plan
except ModuleNotFoundError as missing:
    if missing.name != "hdrh":
        raise
    raise SystemExit("mmserve-bench needs an extra: pip install 'mmserve[loadtest]'") from None

DESCRIPTION = """\
Load generation over HTTP, and comparison with Multi Model Server.

  mmserve-bench load http://127.0.0.1:8080/predictions/noop --connections 16 --body hello
  mmserve-bench load http://127.0.0.1:8080/ping --method GET --rate 500 --arrivals poisson
  mmserve-bench overhead              requests per second and latency of a no-op model
  mmserve-bench overhead --against mms,torchserve,triton,litserve
  mmserve-bench coldstart             load times, memory of a second worker, /ping meanwhile

overhead and coldstart start both servers themselves, as shipped, in folders of their own, and
measure them in turn, in at least 5 rounds: medians, and a 90 % interval of the ratio. A ratio
whose interval is wider than 15 % to either side is void; rounds are added, up to --most-rounds,
to avoid that. Multi Model Server comes from `make oracle` and needs Java.
"""

#: The one that there is a bar for.
MMS = "mms"

EXITS = """\
exit status of overhead and coldstart: 0 every bar is met, 1 one is missed, 3 one is void
(2: the command line or a server is at fault)
"""


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    # So that SIGTERM unwinds, and stops the servers, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, _interrupt)
    ticker = Ticker()
    try:
        return int(arguments.carry_out(arguments, ticker))
    except (ServerFailed, ModelsMissing, ValueError) as failed:
        ticker.done()
        print(f"mmserve-bench: {failed}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        ticker.done()
        print("mmserve-bench: stopped; the servers are stopped too", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mmserve-bench",
        description=DESCRIPTION,
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    load = commands.add_parser(
        "load",
        help="send requests to a server that runs already",
        description="Sends one request over and over and reports rate and latency. Without "
        "--rate each connection sends its next request when it has the reply to the last (closed "
        "loop). With --rate requests are due by the clock and latency counts from when they were "
        "due, so that a server that stalls cannot hide it (open loop).",
    )
    load.add_argument("url", help="http://HOST:PORT/PATH")
    load.add_argument("--method", default="POST")
    load.add_argument("--body", default="", help="text, or @FILE")
    load.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="may be repeated"
    )
    load.add_argument("--connections", type=int, default=1, metavar="N")
    load.add_argument("--duration", type=float, default=10.0, metavar="SECONDS")
    load.add_argument("--warmup", type=float, default=1.0, metavar="SECONDS", help="not counted")
    load.add_argument("--rate", type=float, metavar="N", help="requests per second: open loop")
    load.add_argument("--arrivals", choices=ARRIVALS, default="constant")
    load.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS")
    load.add_argument(
        "--processes", type=int, default=1, metavar="N", help="that share connections and rate"
    )
    _results(load)
    load.set_defaults(carry_out=_load)

    comparing = argparse.ArgumentParser(add_help=False)
    comparing.add_argument(
        "--mmserve",
        metavar="COMMAND",
        help="starts mmserve (the one installed beside this command)",
    )
    comparing.add_argument(
        "--mms",
        metavar="COMMAND",
        help="starts Multi Model Server ($MMS_ORACLE, else .oracle/bin/multi-model-server)",
    )
    comparing.add_argument("--rounds", type=int, default=LEAST_ROUNDS, metavar="N", help="at least")
    comparing.add_argument("--most-rounds", type=int, default=MOST_ROUNDS, metavar="N")
    _results(comparing)

    command = commands.add_parser(
        "overhead",
        parents=[comparing],
        help="compare requests per second of a no-op model",
        description="POST /predictions/noop, one worker, closed loop, at 1, 16 and 64 "
        "connections, access log and request counters on. Bar: 4 times Multi Model Server. Others "
        "that are named with --against are installed with pip where they are missing, run the same "
        "model with a handler of their own kind, and are only stated; one that cannot be "
        "installed or started is left out, with the reason.",
    )
    command.add_argument(
        "--against", default="mms", metavar="LIST", help=f"of {','.join((MMS, *PEERS))} (mms)"
    )
    command.add_argument(
        "--peers",
        type=Path,
        default=Path(".peers"),
        metavar="DIR",
        help="where the others are installed, each in a virtual environment (.peers)",
    )
    command.add_argument("--duration", type=float, default=4.0, metavar="SECONDS", help="per value")
    command.add_argument(
        "--warm", type=float, default=WARM_S, metavar="SECONDS", help="before the first round"
    )
    command.set_defaults(carry_out=_overhead)

    command = commands.add_parser(
        "coldstart",
        parents=[comparing],
        help="compare how BERT-base comes into memory",
        description="loads: POST /models of BERT-base with a plain from_pretrained handler, from "
        "a directory and from archives. memory: what a second worker adds. ping: /ping while a "
        "model loads.",
    )
    command.add_argument(
        "--parts", default=",".join(PARTS), metavar="LIST", help="of loads,memory,ping"
    )
    command.add_argument(
        "--ping-loads", type=int, default=PING_LOADS, metavar="N", help="loads beside /ping"
    )
    command.add_argument(
        "--small", action="store_true", help="a BERT of one layer: to try the command out"
    )
    command.set_defaults(carry_out=_coldstart)
    return parser


def _results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="append JSON lines to COMMAND.jsonl in this folder"
    )


def _load(arguments: argparse.Namespace, ticker: Ticker) -> int:
    plan = Plan(
        url=arguments.url,
        method=arguments.method,
        body=_body(arguments.body),
        headers=tuple(_header(text) for text in arguments.header),
        connections=arguments.connections,
        duration_s=arguments.duration,
        warmup_s=arguments.warmup,
        rate=arguments.rate,
        arrivals=arguments.arrivals,
        timeout_s=arguments.timeout,
        processes=arguments.processes,
    )
    ticker.step(f"{plan.loop} loop, {plan.connections} connections, {plan.duration_s:g} s")
    outcome = run(plan, ticker.tell)
    ticker.done()
    _open(arguments, "load").add("load", plan=plan, outcome=outcome)
    print(_report(outcome))
    return 0


def _report(outcome: Outcome) -> str:
    latency = outcome.latency_ms
    names = ("p50", "p90", "p99", "p999", "max", "mean")
    lines = [
        f"{outcome.rate_per_s:,.1f} requests/s",
        "",
        table(
            [[f"{getattr(latency, name):.3f}" for name in names]], header=[f"{n} ms" for n in names]
        ),
        "",
        "statuses: "
        + (", ".join(f"{k}: {v:,}" for k, v in sorted(outcome.statuses.items())) or "none"),
        f"timeouts: {outcome.timeouts:,}; connection errors: {outcome.connection_errors:,}",
        f"generator: {outcome.generator_cpu:.2f} CPUs"
        + (f", late by {outcome.late_p99_ms:.3f} ms at p99" if outcome.late_p99_ms else ""),
    ]
    return "\n".join(lines)


def _overhead(arguments: argparse.Namespace, ticker: Ticker) -> int:
    return overhead(
        mmserve(arguments.mmserve),
        _against(arguments),
        _open(arguments, "overhead"),
        ticker,
        peers=arguments.peers,
        rounds=arguments.rounds,
        most_rounds=arguments.most_rounds,
        duration_s=arguments.duration,
        warm_s=arguments.warm,
    )


def _against(arguments: argparse.Namespace) -> list[Subject | Peer]:
    names = dict.fromkeys(name for name in arguments.against.split(",") if name)
    if unknown := names.keys() - {MMS, *PEERS}:
        known = ", ".join((MMS, *PEERS))
        raise ValueError(f"--against: {', '.join(sorted(unknown))} is none of {known}")
    if not names:
        raise ValueError("--against names no server")
    return [mms(arguments.mms) if name == MMS else PEERS[name] for name in names]


def _coldstart(arguments: argparse.Namespace, ticker: Ticker) -> int:
    parts = tuple(part for part in arguments.parts.split(",") if part)
    if unknown := set(parts) - set(PARTS):
        raise ValueError(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    return coldstart(
        _options(arguments),
        _open(arguments, "coldstart"),
        ticker,
        parts=parts,
        ping_loads=arguments.ping_loads,
        small=arguments.small,
    )


def _options(arguments: argparse.Namespace) -> Options:
    return Options(
        ours=mmserve(arguments.mmserve),
        theirs=mms(arguments.mms),
        rounds=arguments.rounds,
        most_rounds=arguments.most_rounds,
    )


def _open(arguments: argparse.Namespace, command: str) -> Results:
    return Results(arguments.out and arguments.out / f"{command}.jsonl")


def _body(text: str) -> bytes:
    return Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise ValueError(f"--header {text!r} is not of the form 'NAME: VALUE'")
    return name.strip(), value.strip()
