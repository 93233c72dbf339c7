"""Register, describe, predict, scale, unregister: the life of a model, over HTTP."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, eventually, handler, is_alive


def test_a_model_lives_from_registration_to_removal(start_server: StartServer) -> None:
    server = start_server()
    server.load(server.add("m", PID))
    assert server.names() == ["m"]
    (pid,) = server.workers("m")
    assert server.predict("m").text == str(pid)

    assert server.scale("m", min_worker=2, synchronous=True).status == 200
    pids = server.workers("m")
    assert len(pids) == 2 and pid in pids

    assert server.unregister("m").status == 200
    assert not any(map(is_alive, pids))
    assert server.predict("m").status == 404


def test_a_stop_ends_with_success_and_leaves_nothing(start_server: StartServer) -> None:
    server = start_server()
    server.load(server.add("m", PID))
    server.terminate()
    assert server.exit_code() == 0
    server.leaves_nothing()
    assert not list(server.tmp.iterdir())


def test_a_failed_load_gives_its_archive_back_and_takes_it_from_nobody(
    start_server: StartServer, home: Path
) -> None:
    gate = home / "gate"
    picky = handler(
        "return [open(os.path.join(os.path.dirname(__file__), 'words')).read()]",
        load=f"if os.path.exists({str(gate)!r}): raise ValueError('not now')",
    )
    server = start_server()

    def in_use() -> int:
        return len(list(server.tmp.glob("mmserve-*/tokens/*")))

    def unpacked() -> int:
        return len(list(server.tmp.glob("mmserve-*/entries/*/tree")))

    archive = server.add("m", picky, {"words": "still here"})
    server.load(archive, model_name="a")
    gate.touch()
    for name in ("b", "c"):
        reply = server.register(archive, model_name=name, initial_workers=1, synchronous=True)
        assert reply.status == 500
        assert "not now" in reply.message
    assert (in_use(), unpacked()) == (1, 1)
    assert server.predict("a").text == "still here"
    assert server.register(archive, model_name="a").status == 409
    assert (in_use(), unpacked()) == (1, 1)

    gate.unlink()
    (pid,) = server.workers("a")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.workers("a") not in ([], [pid]), what="a new worker")
    assert server.predict("a").text == "still here"
    assert server.unregister("a").status == 200
    assert in_use() == 0
