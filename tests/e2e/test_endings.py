"""The end of servers and processes, gentle and not: what may be left is nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, SLEEPY, eventually, handler, is_alive, together, zombies

#: Holds the GIL in C for ever, behind a child in a session of its own that ignores SIGTERM.
STUBBORN = handler(
    """
    subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
    subprocess.Popen(["sh", "-c", "trap '' TERM HUP; while :; do sleep 1; done"])
    open(bytes(b).decode(), "w").close()
    import re
    re.match("(a*)*b", "a" * 64)
    """
)


def can(*words: str) -> bool:
    """Whether a command works here: not every place lets namespaces be made."""
    if shutil.which(words[0]) is None:
        return False
    return subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0


def test_front_and_zygote_killed_together_leave_nothing(
    start_server: StartServer, home: Path
) -> None:
    server = start_server()
    server.load(server.add("calm", PID))
    server.load(server.add("stubborn", STUBBORN))
    begun = home / "begun"
    with together() as run:
        reply = run(server.predict, "stubborn", str(begun))
        eventually(begun.exists, what="the handler spins")
        for pid in (server.zygote(), server.pid):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(OSError):
            reply.result()
    assert server.exit_code() == -signal.SIGKILL
    server.leaves_nothing(limit_s=1)


def test_a_killed_front_leaves_nothing(start_server: StartServer) -> None:
    server = start_server(preload_model="true")
    server.load(server.add("m", PID), initial_workers=2)
    os.kill(server.pid, signal.SIGKILL)
    assert server.exit_code() != 0
    server.leaves_nothing(limit_s=1)


def test_work_goes_on_when_the_zygote_is_killed(start_server: StartServer) -> None:
    server = start_server()
    server.load(server.add("m", PID))
    (pid,) = server.workers("m")
    old = server.zygote()
    os.kill(old, signal.SIGKILL)
    assert server.predict("m").text == str(pid)
    eventually(lambda: not is_alive(old), what="the zygote is gone")

    assert server.scale("m", min_worker=2, synchronous=True).status == 200
    assert pid in server.workers("m")
    os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: len(server.workers("m")) == 2 and pid not in server.workers("m"),
        what="the worker that died after its zygote is replaced",
    )
    server.terminate()
    assert server.exit_code() == 0
    server.leaves_nothing()


def test_a_second_signal_does_not_wait_for_requests(start_server: StartServer, home: Path) -> None:
    begun = home / "begun"
    source = handler(f"open({str(begun)!r}, 'w').close(); time.sleep(600)")
    server = start_server(stop_timeout_seconds=300)
    server.load(server.add("m", source))
    with together() as run:
        reply = run(server.predict, "m")
        eventually(begun.exists, what="the request has begun")
        server.terminate()
        server.saw("stopping")
        server.terminate()
        assert server.exit_code() == 0
        assert reply.exception() or reply.result().status >= 500
    server.leaves_nothing()


def test_a_hang_up_does_not_end_the_server(start_server: StartServer) -> None:
    server = start_server()
    server.process.send_signal(signal.SIGHUP)
    server.process.send_signal(signal.SIGPIPE)
    server.load(server.add("m", PID))
    assert server.predict("m").status == 200


def test_what_a_handler_starts_ends_with_its_worker(start_server: StartServer, home: Path) -> None:
    source = handler(
        """
        child = subprocess.Popen(["sleep", "1000"])
        return [str(child.pid)]
        """
    )
    server = start_server()
    server.load(server.add("m", source))
    child = int(server.predict("m").text)
    assert is_alive(child)
    (pid,) = server.workers("m")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not is_alive(child), what="the child of the killed worker is gone")
    child = int(server.predict("m").text)
    assert is_alive(child)
    assert server.unregister("m").status == 200
    eventually(lambda: not is_alive(child), what="the handler's child is gone")


@pytest.mark.skipif(
    not can("unshare", "--pid", "--fork", "--mount-proc"), reason="needs PID namespaces"
)
def test_as_the_first_process_it_reaps_orphans_and_ends(start_server: StartServer) -> None:
    """As in a container without an init: strangers' orphans become children of pid 1."""
    orphan = 'subprocess.run(["sh", "-c", "sleep 0.01 &"]); return ["ok"]'
    prefix = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    server = start_server(prefix=prefix)
    archive = server.add("m", handler(orphan))
    for _ in range(20):
        server.load(archive)
        assert server.predict("m").text == "ok"
        assert server.unregister("m").status == 200
    (front,) = [pid for pid, words in server.processes().items() if "ModelServer" in words]
    eventually(
        lambda: not any(zombies(pid) for pid in server.processes()), what="all dead are reaped"
    )
    os.kill(front, signal.SIGTERM)
    assert server.exit_code() == 0
    server.leaves_nothing()


def test_a_stop_refuses_new_requests_and_finishes_those_that_run(
    start_server: StartServer, home: Path
) -> None:
    release, begun = home / "release", home / "begun"
    source = handler(
        f"""
        open({str(begun)!r}, "w").close()
        while not os.path.exists({str(release)!r}): time.sleep(0.01)
        return ["done"]
        """
    )
    server = start_server()
    server.load(server.add("m", source))
    with together() as run:
        running = run(server.predict, "m")
        eventually(begun.exists, what="the request runs")
        server.terminate()
        server.saw("stopping")
        try:
            late = server.predict("m").status
        except OSError:
            late = 503  # nobody accepts any more
        assert late == 503
        release.touch()
        assert running.result().text == "done"
    assert server.exit_code() == 0


def test_a_start_clears_what_a_killed_server_left(start_server: StartServer, home: Path) -> None:
    first = start_server()
    first.load(first.add("m", SLEEPY, {"weights.bin": b"w" * 100_000}))
    for pid in first.processes():
        os.kill(pid, signal.SIGKILL)
    first.exit_code()
    assert list(first.tmp.rglob("weights.bin"))

    second = start_server(folder=first.home)
    eventually(
        lambda: not list(second.tmp.rglob("weights.bin")), what="the dead server's files are gone"
    )
