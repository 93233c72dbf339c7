"""A model whose workers cannot start says why, and works as soon as they can."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.conftest import StartServer
from tests.e2e.server import eventually, handler


def broken_until(mended: Path) -> str:
    return handler(load=f"open({str(mended)!r}).close()")


def test_nobody_waits_for_a_model_that_does_not_load(start_server: StartServer, home: Path) -> None:
    server = start_server()
    archive = server.add("m", broken_until(home / "mended"))
    assert server.register(archive, initial_workers=1, synchronous=False).status == 202

    refused = server.predict("m")
    assert refused.status == 503
    assert refused.message.startswith("No worker is available to serve request for model: m")
    assert "FileNotFoundError" in refused.message
    assert "FileNotFoundError" in server.describe("m")["cause"]

    (home / "mended").touch()
    eventually(lambda: server.predict("m").status == 200, what="the model serves")
    assert "cause" not in server.describe("m")


def test_a_port_that_is_taken_costs_one_sentence(start_server: StartServer) -> None:
    taken = f"http://127.0.0.1:{start_server().port()}"
    second = start_server(wait=False, inference_address=taken)
    assert second.exit_code() == 1
    assert "Traceback" not in second.output()
    assert "Address already in use" in second.output()
