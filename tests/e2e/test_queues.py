"""Requests that wait, are refused, or whose client has gone."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.conftest import StartServer
from tests.e2e.server import Server, eventually, handler, together


def gated(home: Path) -> str:
    """A handler that holds while the body is `hold` and no file `release` is there; it writes
    every body that it sees to `seen`."""
    return handler(
        f"""
        with open({str(home / "seen")!r}, "a") as log: log.write(bytes(b).decode() + "\\n")
        while bytes(b) == b"hold" and not os.path.exists({str(home / "release")!r}):
            time.sleep(0.01)
        return ["ok"]
        """
    )


def seen(home: Path) -> list[str]:
    log = home / "seen"
    return log.read_text().split() if log.exists() else []


def test_a_full_queue_refuses_at_once_and_other_models_do_not_notice(
    start_server: StartServer, home: Path
) -> None:
    server = start_server(job_queue_size=2)
    server.load(server.add("m", gated(home)))
    server.load(server.add("other", handler()))
    with together() as run:
        held = run(server.predict, "m", "hold")
        eventually(lambda: seen(home) == ["hold"], what="the worker is busy")
        crowd = [run(server.predict, "m", f"n{number}") for number in range(6)]
        refused = eventually(
            lambda: (done := [each for each in crowd if each.done()]) and len(done) >= 4 and done,
            what="all that the queue has no room for are refused",
        )
        for reply in (each.result() for each in refused):
            assert reply.status == 503 and reply.json()["type"] == "ServiceUnavailableException"
            assert "queue is full" in reply.message
            assert int(reply.headers["retry-after"]) >= 1
        assert server.predict("other").text == "ok"
        (home / "release").touch()
        assert held.result().status == 200
        assert sorted(each.result().status for each in crowd) == [200, 200, 503, 503, 503, 503]


def test_without_workers_the_answer_differs_from_that_of_a_full_queue(
    start_server: StartServer, home: Path
) -> None:
    server = start_server()
    assert server.register(server.add("m", handler())).status == 200
    reply = server.predict("m")
    assert reply.status == 503 and "no workers" in reply.message


def leave(server: Server, body: bytes) -> None:
    """Sends a request and does not wait for the answer."""
    with server.connect() as client:
        head = f"POST /predictions/m HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)


def test_a_request_whose_client_has_gone_is_not_worked_on(
    start_server: StartServer, home: Path
) -> None:
    server = start_server()
    server.load(server.add("m", gated(home)))
    with together() as run:
        held = run(server.predict, "m", "hold")
        eventually(lambda: seen(home) == ["hold"], what="the worker is busy")
        for _ in range(20):
            leave(server, b"gone")
        patient = run(server.predict, "m", "patient")
        # The connections that were left are closed by the server, too, before it goes on.
        eventually(lambda: server.open_files() < 60, what="the server has seen them leave")
        (home / "release").touch()
        assert held.result().status == patient.result().status == 200
    assert seen(home) == ["hold", "patient"]


def test_requests_that_wait_for_a_removed_model_are_answered(
    start_server: StartServer, home: Path
) -> None:
    server = start_server(unregister_model_timeout=60)
    server.load(server.add("m", gated(home)))
    with together() as run:
        held = run(server.predict, "m", "hold")
        eventually(lambda: seen(home) == ["hold"], what="the worker is busy")
        waiting = run(server.predict, "m", "next")
        removed = run(server.unregister, "m")
        assert waiting.result().status in (404, 503)
        (home / "release").touch()
        assert held.result().text == "ok"
        assert removed.result().status == 200
    assert server.predict("m").status == 404


def test_a_request_waits_no_longer_than_the_settings_say(
    start_server: StartServer, home: Path
) -> None:
    server = start_server(max_queue_wait_seconds=0.2)
    server.load(server.add("m", gated(home)))
    with together() as run:
        held = run(server.predict, "m", "hold")
        eventually(lambda: seen(home) == ["hold"], what="the worker is busy")
        reply = server.predict("m", "late")
        assert reply.status == 503 and "max_queue_wait_seconds" in reply.message
        (home / "release").touch()
        assert held.result().status == 200
    assert "late" not in seen(home)


def test_a_full_batch_leaves_at_once_and_each_gets_its_own_answer(
    start_server: StartServer,
) -> None:
    source = handler("return [f\"{bytes(one['body']).decode()} of {len(data)}\" for one in data]")
    server = start_server()
    # The delay is longer than the test may take: only a full batch can leave in time.
    server.load(server.add("m", source), batch_size=4, max_batch_delay=600_000)
    with together() as run:
        replies = [run(server.predict, "m", str(number)) for number in range(4)]
        assert [each.result().text for each in replies] == [f"{n} of 4" for n in range(4)]


def test_an_error_of_a_batch_reaches_all_of_it_and_the_worker_stays(
    start_server: StartServer,
) -> None:
    source = handler(
        """
        if any(bytes(one['body']) == b'bad' for one in data): raise ValueError
        return [str(os.getpid())] * len(data)
        """
    )
    server = start_server()
    server.load(server.add("m", source), batch_size=3, max_batch_delay=600_000)
    with together() as run:
        replies = [run(server.predict, "m", body) for body in ("good", "bad", "good")]
        found = [each.result() for each in replies]
        assert [(r.status, r.message) for r in found] == [(503, "Prediction failed")] * 3
        assert len({r.headers["x-request-id"] for r in found}) == 3
        pids = server.workers("m")
        replies = [run(server.predict, "m", "good") for _ in range(3)]
        assert {int(each.result().text) for each in replies} == set(pids)


def test_others_are_answered_while_a_worker_encodes_its_result(
    start_server: StartServer, home: Path
) -> None:
    setup = f"""
class Slow(dict):
    def items(self):
        open({str(home / "encodes")!r}, "w").close()
        while not os.path.exists({str(home / "release")!r}): time.sleep(0.01)
        return [("pid", os.getpid())]
"""
    server = start_server()
    server.load(server.add("m", handler("return [Slow(a=1)]", setup=setup)))
    (pid,) = server.workers("m")
    server.load(server.add("other", handler()))
    with together() as run:
        slow = run(server.predict, "m")
        eventually((home / "encodes").exists, what="the result is being encoded")
        assert server.predict("other").text == "ok"
        (home / "release").touch()
        assert slow.result().json() == {"pid": pid}


def test_a_large_json_result_is_encoded_in_the_worker(start_server: StartServer) -> None:
    server = start_server(max_response_size=100_000_000)
    server.load(server.add("m", handler("return [[i / 7 for i in range(300_000)]]")))
    server.load(server.add("other", handler()))
    with together() as run:
        large = run(server.predict, "m")
        while not large.done():
            assert server.predict("other").text == "ok"
        numbers = json.loads(large.result().body)
    assert numbers == [i / 7 for i in range(300_000)]
    assert large.result().headers["content-type"] == "application/json"
