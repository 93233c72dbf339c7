"""Workers that load slowly, fail, crash, grow old: what becomes of the model and its requests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, Server, eventually, handler, is_alive, together


def waits_for(path: Path) -> str:
    """A handler that loads when a file is there."""
    return handler(
        "return [str(os.getpid())]",
        load=f"open({str(path) + '.asked'!r}, 'w').close()\n"
        f"while not os.path.exists({str(path)!r}): time.sleep(0.01)",
    )


def test_a_slow_load_at_start_holds_nobody_up(start_server: StartServer, home: Path) -> None:
    """However long it takes: no limit below that of the settings is hidden anywhere."""
    gate = home / "gate"
    server = start_server(
        archives={"slow": waits_for(gate), "quick": PID},
        models=("slow=slow.mar", "quick=quick.mar"),
        default_workers_per_model=1,
    )
    assert server.predict("quick").status == 200
    assert server.describe("slow")["workers"][0]["status"] == "LOADING"
    assert server.ask("GET", "/ping").status == 200
    gate.touch()
    eventually(lambda: server.workers("slow"), what="the slow model is ready")


def test_models_load_side_by_side(start_server: StartServer, home: Path) -> None:
    """Each of the two only finishes loading once the other has begun."""
    one, other = home / "one", home / "other"
    source = "while not os.path.exists({!r}): time.sleep(0.01)"
    server = start_server()
    for mine, theirs in ((one, other), (other, one)):
        load = f"open({str(mine)!r}, 'w').close()\n" + source.format(str(theirs))
        server.add(mine.name, handler(load=load))
    with together() as run:
        both = [run(server.load, f"{name}.mar") for name in ("one", "other")]
        for each in both:
            each.result()
    assert server.names() == ["one", "other"]


def test_the_limit_for_loading_is_not_that_for_predicting(start_server: StartServer) -> None:
    server = start_server(default_response_timeout_seconds=1, load_timeout_seconds=60)
    server.load(server.add("m", handler("time.sleep(60)", load="time.sleep(1.5)")))
    reply = server.predict("m")
    assert reply.status == 500 and reply.message.startswith("Worker died.")
    eventually(lambda: server.workers("m"), what="a fresh worker took its place")


def test_a_load_over_its_limit_fails_and_frees_the_name(start_server: StartServer) -> None:
    server = start_server(load_timeout_seconds=1)
    archive = server.add("m", handler(load="time.sleep(60)"))
    reply = server.register(archive, initial_workers=1, synchronous=True)
    assert reply.status == 500 and reply.message.startswith("Failed to start workers")
    assert server.names() == []


def test_a_failed_load_tells_the_cause_and_frees_the_name(start_server: StartServer) -> None:
    server = start_server()
    archive = server.add("m", handler(load="raise ValueError('no such layer: fc9')"))
    reply = server.register(archive, initial_workers=1, synchronous=True)
    assert (reply.status, server.names()) == (500, [])
    assert "no such layer: fc9" in reply.message


def test_memory_that_is_missing_while_loading_is_507(start_server: StartServer) -> None:
    server = start_server()
    archive = server.add("m", handler(load="raise MemoryError"))
    for _ in range(2):  # the name is free again
        assert server.register(archive, initial_workers=1, synchronous=True).status == 507
    assert server.names() == []


def test_an_asynchronous_load_that_fails_can_be_removed(start_server: StartServer) -> None:
    server = start_server()
    archive = server.add("m", handler(load="raise ValueError"))
    assert server.register(archive, initial_workers=1, synchronous=False).status == 202
    server.saw("worker failed", limit_s=10)
    assert not server.workers("m")
    assert server.unregister("m").status == 200


def test_restarts_that_fail_are_given_up_where_the_settings_say_so(
    start_server: StartServer,
) -> None:
    server = start_server(max_worker_restarts=1)
    archive = server.add("m", handler(load="raise ValueError('broken for good')"))
    server.register(archive, initial_workers=1, synchronous=False)
    described = eventually(
        lambda: (found := server.describe("m")).get("state") == "FAILED" and found,
        what="the model is given up",
    )
    assert "broken for good" in described["cause"]
    reply = server.predict("m")  # at once: a request that waited would take 20 s and say so
    assert reply.status == 503 and "broken for good" in reply.message


def crowd_around_a_kill(server: Server, home: Path) -> None:
    begun = home / "begun"
    source = handler(
        f"""
        if bytes(b) == b"hold":
            open({str(begun)!r}, "w").close()
            time.sleep(600)
        return [str(os.getpid())]
        """
    )
    server.load(server.add("m", source))
    (pid,) = server.workers("m")
    with together() as run:
        held = run(server.predict, "m", "hold")
        eventually(begun.exists, what="a request runs")
        waiting = [run(server.predict, "m", "next") for _ in range(5)]
        os.kill(pid, signal.SIGKILL)
        assert held.result().status in (500, 507)
        answers = [reply.result() for reply in waiting]
    assert [reply.status for reply in answers] == [200] * 5
    assert str(pid) not in {reply.text for reply in answers}


def test_a_killed_worker_costs_the_request_it_had_begun_and_no_other(
    start_server: StartServer, home: Path
) -> None:
    crowd_around_a_kill(start_server(), home)


def test_a_worker_is_replaced_after_so_many_requests_and_none_fails(
    start_server: StartServer,
) -> None:
    server = start_server(worker_max_requests=3)
    server.load(server.add("m", PID))
    seen: list[str] = []
    while len(set(seen)) < 4:
        reply = server.predict("m")
        assert reply.status == 200
        seen.append(reply.text)
        assert len(seen) < 200, seen


def test_a_crowd_loses_nothing_while_its_workers_are_replaced(start_server: StartServer) -> None:
    server = start_server(worker_max_requests=7)
    server.load(server.add("m", PID), initial_workers=2)
    with together(8) as run:
        replies = [run(server.predict, "m") for _ in range(200)]
        found = [each.result() for each in replies]
    assert {reply.status for reply in found} == {200}
    assert len({reply.text for reply in found}) > 2  # more than began


def test_a_worker_that_grows_is_replaced_and_none_fails(start_server: StartServer) -> None:
    source = handler(
        "kept.append(bytearray(30_000_000)); return [str(os.getpid())]", setup="kept = []"
    )
    server = start_server(worker_memory_limit=150_000_000)
    server.load(server.add("m", source))
    seen: set[str] = set()
    for _ in range(200):
        reply = server.predict("m")
        assert reply.status == 200
        seen.add(reply.text)
        if len(seen) == 3:
            break
    assert len(seen) == 3


def test_a_preloaded_model_is_loaded_once_for_all_its_workers(
    start_server: StartServer, home: Path
) -> None:
    log = home / "loads"
    source = handler(
        "return [f\"{os.getpid()} {context.system_properties['batch_size']}\"]",
        load=f"open({str(log)!r}, 'a').write('loaded\\n')",
    )
    server = start_server(preload_model="true")
    server.load(server.add("m", source), initial_workers=3, batch_size=4)
    assert len(server.workers("m")) == 3
    assert log.read_text() == "loaded\n"
    assert server.predict("m").text.endswith(" 4")


def test_however_a_handler_ends_its_process_it_costs_one_request(
    start_server: StartServer,
) -> None:
    server = start_server()
    source = handler("exec(bytes(b)); return ['ok']", setup="import ctypes")
    server.load(server.add("m", source))
    for deed in (
        "sys.exit(0)",
        "os._exit(0)",
        "os.abort()",
        "ctypes.string_at(0)",
        "raise KeyboardInterrupt",
        "os.kill(os.getpid(), 15)",
    ):
        reply = server.predict("m", deed)
        assert reply.status == 500 and reply.message.startswith("Worker died."), deed
        assert server.predict("m", "pass").text == "ok", deed


def test_a_model_that_is_scaled_to_nothing_ends_its_workers_and_comes_back(
    start_server: StartServer,
) -> None:
    server = start_server()
    server.load(server.add("m", PID))
    for most in (1, 0):
        (pid,) = server.workers("m")
        reply = server.scale("m", min_worker=0, max_worker=most, synchronous=True)
        assert reply.status == 200
        assert not is_alive(pid)
        assert server.describe("m")["workers"] == []
        refused = server.predict("m")
        assert refused.status == 503
        assert refused.message.startswith("No worker is available to serve request for model: m.")
        assert server.scale("m", min_worker=1, synchronous=True).status == 200
        assert server.predict("m").text != str(pid)
    assert server.scale("m", min_worker=1, max_worker=0).status == 400


def test_a_model_that_finds_no_room_is_507_and_costs_no_other(start_server: StartServer) -> None:
    server = start_server(max_worker_processes=1)
    archive = server.add("m", PID)
    server.load(archive, model_name="first")
    (pid,) = server.workers("first")
    for _ in range(2):  # the name is free again
        reply = server.register(archive, model_name="second", initial_workers=1, synchronous=True)
        assert reply.status == 507
        assert server.names() == ["first"]
    assert server.predict("first").text == str(pid)
    assert server.unregister("first").status == 200
    server.load(archive, model_name="second")  # who unloads has room


def test_workers_belong_to_one_model(start_server: StartServer) -> None:
    server = start_server(default_workers_per_model=1)
    archive = server.add("m", PID)
    for number in range(4):
        server.load(archive, model_name=f"m{number}")
    pids = {server.workers(f"m{number}")[0] for number in range(4)}
    assert len(pids) == 4
