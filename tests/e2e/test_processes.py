"""What a server is made of: which processes, what they are called, what they weigh."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, Server, handler

#: What the SageMaker toolkit looks for in the command lines of all processes.
SOUGHT = b"com.amazonaws.ml.mms.ModelServer"
IDLE_LIMIT_BYTES = 60_000_000


def found_by_the_toolkit(server: Server) -> list[int]:
    return [
        pid
        for pid in server.processes()
        if SOUGHT in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


def test_the_toolkit_finds_one_process_and_that_is_the_front(start_server: StartServer) -> None:
    """It fails with none, and with two."""
    server = start_server(preload_imports="colorsys")
    assert len(found_by_the_toolkit(server)) == 1
    (front,) = found_by_the_toolkit(server)
    for name, fields in {
        "forked": {"initial_workers": 2},
        "template": {"initial_workers": 2, "preload_model": True},
    }.items():
        server.load(server.add(name, PID), **fields)
    own = {"colorsys.py": "WHOSE = 'the archive'\n"}
    source = handler(setup="import colorsys", predict="return [colorsys.WHOSE]")
    server.load(server.add("fresh", source, own))
    assert server.predict("fresh").text == "the archive"
    (worker,) = server.describe("fresh")["workers"]
    assert worker["start"] == "fresh" and "colorsys" in worker["startReason"]
    assert len(server.processes()) > 7
    assert found_by_the_toolkit(server) == [front]


def test_an_idle_server_weighs_little(start_server: StartServer) -> None:
    server = start_server(preload_imports="none")
    weight = 0
    for pid in server.processes():
        (pss,) = re.findall(
            r"^Pss: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M
        )
        weight += int(pss) * 1024
    assert weight < IDLE_LIMIT_BYTES


def test_the_log_says_what_each_preloaded_import_costs(start_server: StartServer) -> None:
    server = start_server(preload_imports="colorsys,no_such_module")
    assert re.search(r" imported=colorsys s=[\d.]+ rss_mb=\d+", server.saw(" - preloaded "))
    missing = server.saw(" - not preloaded ")
    assert "imported=no_such_module" in missing
    assert "No module named 'no_such_module'" in missing
