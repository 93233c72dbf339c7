"""The command line."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmserve_loadtest import processes
from mmserve_loadtest.coldstart import ping_while_loading
from mmserve_loadtest.main import main
from mmserve_loadtest.servers import ServerFailed, Subject, running


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for word in ("load", "overhead", "coldstart", "exit status", "make oracle"):
        assert word in told


def test_load_reports_and_appends_a_line_to_the_results(
    tiny_server: Callable[[], Any], tmp_path: Path
) -> None:
    async def scenario() -> tuple[subprocess.CompletedProcess[str], int]:
        server = tiny_server()
        async with server.listening() as base:
            command = [sys.executable, "-m", "mmserve_loadtest", "load", f"{base}/ok", "--body"]
            command += ["hello", "--connections", "2", "--duration", "0.3", "--warmup", "0"]
            command += ["--header", "X-A: b", "--out", str(tmp_path)]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60
            )
        return done, server.seen["/ok"]

    done, seen = asyncio.run(scenario())
    assert done.returncode == 0, done.stderr
    assert "requests/s" in done.stdout
    assert "closed loop, 2 connections" in done.stderr
    (line,) = (tmp_path / "load.jsonl").read_text().splitlines()
    result = json.loads(line)
    assert result["kind"] == "load"
    assert result["outcome"]["statuses"] == {"200": seen}
    assert result["plan"]["headers"] == [["X-A", "b"]]
    assert {"cpu", "cores", "memory_bytes", "system"} <= result["machine"].keys()
    assert {"python", "mmserve-bench", "hdrhistogram", "loop"} <= result["versions"].keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["load", "nowhere"], "http://HOST"),
        (["load", "http://127.0.0.1:1/", "--rate", "0"], "above zero"),
        (["load", "http://127.0.0.1:1/", "--header", "x"], "NAME: VALUE"),
        (["overhead", "--mmserve", "true", "--mms", "/nowhere/mms"], "make oracle"),
        (["coldstart", "--parts", "loads,nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_told_in_a_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def stand_ins() -> list[str]:
    """Two stand-ins: a comparison of one server with itself."""
    command = f"{sys.executable} {Path(__file__).with_name('standin.py')}"
    return ["--mmserve", command, "--mms", command, "--rounds", "1", "--most-rounds", "1"]


def with_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that looks like Java; the stand-in does not need it."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))


def results_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_overhead_measures_both_in_turn_and_tells_the_ratio(
    stand_ins: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_java(tmp_path, monkeypatch)
    words = ["overhead", *stand_ins, "--duration", "0.1", "--warm", "0.1", "--out", str(tmp_path)]
    assert main(words) == 3  # one round says nothing
    told = capsys.readouterr().out
    assert "no-op, 64 connections" in told
    assert "void" in told
    lines = results_of(tmp_path / "overhead.jsonl")
    loads = [(line["server"], line["plan"]["connections"]) for line in lines if "plan" in line]
    assert sorted(loads) == sorted((name, n) for name in ("MMS", "mmserve") for n in (1, 16, 64))
    compared = [line for line in lines if line["kind"] == "overhead"]
    assert [line["verdict"] for line in compared] == ["void"] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_comparison_that_is_interrupted_stops_both_servers(
    stand_ins: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with_java(tmp_path, monkeypatch)
    command = [sys.executable, "-m", "mmserve_loadtest", "overhead", *stand_ins, "--warm", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        told = [next(bench.stderr)]
        while "warming" not in told[-1]:
            told.append(next(bench.stderr))
        started = processes.of_run("", bench.pid) - {bench.pid}
        assert len(started) >= 4  # two servers, each with a worker and a child
        bench.send_signal(number)
        assert "the servers are stopped too" in bench.stderr.read()
        assert bench.wait(30) == 130
    assert not [pid for pid in started if processes.of_run("", pid)]


def test_pings_that_fail_while_a_model_loads_are_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their latencies are those of the pings that were answered: the others would not show."""
    with_java(tmp_path, monkeypatch)
    monkeypatch.setenv("STAND_IN_PING", "503")
    stand_in = Path(__file__).with_name("standin.py")
    subject = Subject(name="stand-in", command=(sys.executable, str(stand_in)), version="1")
    with running(subject, tmp_path) as server, pytest.raises(ServerFailed, match="503"):
        ping_while_loading(server, "m")


@pytest.mark.slow
@pytest.mark.torch
def test_coldstart_measures_loads_memory_and_ping(
    stand_ins: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_java(tmp_path, monkeypatch)
    words = ["coldstart", *stand_ins, "--small", "--ping-loads", "1", "--out", str(tmp_path)]
    assert main(words) in (1, 3)
    told = capsys.readouterr().out
    for part in (".mar, deflated, first", "Private dirty memory", "/ping, 99th percentile"):
        assert part in told
    kinds = {line["kind"] for line in results_of(tmp_path / "coldstart.jsonl")}
    assert kinds == {"coldstart", "memory", "ping"}
