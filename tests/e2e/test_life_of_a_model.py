"""Register, describe, predict, scale, unregister: the life of a model, over HTTP."""

from __future__ import annotations

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, is_alive


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
