"""Few descriptors, many models, many clients that leave: nothing adds up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import struct

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, Server, eventually

pytestmark = pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")

FEW = ("prlimit", "--nofile=256:256")
ROUNDS = 60


def settles(server: Server, baseline: int, spare: int = 3) -> None:
    """Waits until the front has no more descriptors than before, a few kept ones aside."""
    eventually(
        lambda: server.open_files() <= baseline + spare,
        what=f"descriptors are back at about {baseline}",
    )


def test_models_that_come_and_go_leave_no_descriptors(start_server: StartServer) -> None:
    server = start_server(prefix=FEW)
    archive = server.add("m", PID)
    server.load(archive)
    server.unregister("m")
    baseline = server.open_files()
    for _ in range(ROUNDS):
        server.load(archive)
        assert server.unregister("m").status == 200
    settles(server, baseline)
    eventually(
        lambda: not any("mmserve.runtime" in words for words in server.processes().values()),
        what="no worker is left",
    )


def test_workers_that_crash_leave_no_descriptors(start_server: StartServer) -> None:
    server = start_server(prefix=FEW)
    server.load(server.add("m", PID))
    baseline = server.open_files()
    # Each dies after a request: one that did nothing is brought back later and later.
    for _ in range(6):
        reply = eventually(
            lambda: (found := server.predict("m")).status == 200 and found, what="a worker is there"
        )
        os.kill(int(reply.text), signal.SIGKILL)
    eventually(lambda: server.predict("m").status == 200, what="a worker is there")
    settles(server, baseline)


def test_clients_that_hang_up_leave_no_descriptors_and_no_errors(
    start_server: StartServer,
) -> None:
    server = start_server(prefix=FEW)
    server.load(server.add("m", PID))
    baseline = server.open_files()
    for number in range(300):
        client = server.connect()
        with contextlib.suppress(OSError):
            match number % 4:
                case 0:
                    pass
                case 1:
                    client.sendall(b"GET")
                case 2:
                    client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40))
                case 3:
                    client.sendall(b"POST /predictions/m HTTP/1.1\r\nContent-Length: 9\r\n\r\nhalf")
        # Half of them leave with a reset in place of a farewell.
        if number % 2:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    settles(server, baseline)
    assert server.predict("m").status == 200
    log = server.output()
    assert "Traceback" not in log and "[ERROR]" not in log


def test_a_server_out_of_descriptors_serves_again_once_some_are_free(
    start_server: StartServer,
) -> None:
    server = start_server(prefix=FEW)
    server.load(server.add("m", PID))
    with contextlib.ExitStack() as stack:
        for _ in range(280):
            stack.enter_context(server.connect())  # the kernel accepts what the server cannot
    assert server.predict("m").status == 200
    assert server.load(server.add("other", PID)) is None


def test_many_names_for_one_archive_share_its_files(start_server: StartServer) -> None:
    server = start_server()
    archive = server.add("m", PID, {"weights.bin": os.urandom(100_000)})
    for name in ("one", "two", "three"):
        server.load(archive, model_name=name)
    assert len(list(server.tmp.rglob("weights.bin"))) == 1
    for name in ("one", "two"):
        server.unregister(name)
    assert server.scale("three", min_worker=2, synchronous=True).status == 200
    server.load(archive, model_name="one")
    assert server.predict("three").status == server.predict("one").status == 200
    assert len(list(server.tmp.rglob("weights.bin"))) == 1


def test_hundreds_of_parked_models_are_listed_page_by_page(start_server: StartServer) -> None:
    server = start_server()
    archive = server.add("m", PID)
    names = [f"m{number:03}" for number in range(230)]
    for name in names:
        assert server.register(archive, model_name=name).status == 200
    found: list[str] = []
    token: str | None = "0"
    while token is not None:
        page = server.manage("GET", "/models", next_page_token=token).json()
        found += [model["modelName"] for model in page["models"]]
        token = page.get("nextPageToken")
    assert found == names
    assert server.ask("GET", "/ping").json() == {"status": "Healthy"}
