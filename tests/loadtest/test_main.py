"""The command line."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmserve_loadtest.main import main


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
