"""How a server starts with models, fails to, and is stopped on the way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, eventually, handler, together, write_mar
from tests.models.workshop import Web, open_web

BAD = handler(load="raise ValueError('no weights')")
SLOW = handler(load="print('loading', flush=True); time.sleep(600)")


class SlowWeb:
    """A web server that answers once it may.

    Attributes:
        asked: paths that somebody waits for.
    """

    def __init__(self, web: Web, archive: bytes) -> None:
        self.url, self._archive = web.url, archive
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        for name in ("a", "b"):
            web.pages[f"/{name}.mar"] = self._answer

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        self.may_answer.wait(60)
        request.send_response(200)
        request.send_header("Content-Length", str(len(self._archive)))
        request.end_headers()
        request.wfile.write(self._archive)


@pytest.fixture
def slow_web(home: Path) -> Iterator[SlowWeb]:
    archive = write_mar(home / "m.mar", PID).read_bytes()
    with open_web() as web:
        slow = SlowWeb(web, archive)
        try:
            yield slow
        finally:
            slow.may_answer.set()


# Starts


def test_a_start_ends_with_one_line_about_the_models_that_failed(start_server: StartServer) -> None:
    server = start_server(
        archives={"bad": BAD, "good": PID},
        models=("gone=absent.mar", "bad.mar", "good.mar"),
        default_workers_per_model=1,
    )
    assert server.saw("some start-up models failed").endswith('models="gone, bad"')
    assert "absent.mar" in server.saw("Failed to load model: gone")
    eventually(lambda: server.workers("good"), what="the good one is loaded")
    assert server.predict("good").status == 200


def test_what_is_secret_in_a_url_is_not_logged_and_the_api_gives_it_back(
    start_server: StartServer, home: Path
) -> None:
    archive = write_mar(home / "m.mar", PID).read_bytes()
    with open_web() as web:
        web.pages["/m.mar"] = archive
        url = web.url.replace("//", "//user:hush@") + "/{}.mar?X-Amz-Signature=hush"
        at_start, absent = url.format("m"), url.format("absent")
        server = start_server(models=(f"a={at_start}", f"b={absent}", absent, "s3://hush@b/m"))
        server.saw("some start-up models failed")
        server.load(at_start, model_name="c")
        assert server.register(at_start, model_name="d").status == 200
        assert server.register(absent).status == 400
        assert "hush" not in server.register("ftp://user:hush@host/m.mar").message
    listed = server.manage("GET", "/models").json()["models"]
    assert {model["modelUrl"] for model in listed} == {at_start}
    assert server.manage("GET", "/models/c").json()["modelUrl"] == at_start
    server.terminate()
    assert server.exit_code() == 0
    told = [server.output(), *(path.read_text() for path in server.logs.iterdir())]
    assert not [line for text in told for line in text.splitlines() if "hush" in line]
    assert "model loaded" in told[0]


def test_a_start_where_all_goes_well_says_so(start_server: StartServer) -> None:
    server = start_server(archives={"m": PID}, models=("ALL",), default_workers_per_model=2)
    server.saw("all start-up models are loaded")
    assert len(server.workers("m")) == 2


def test_of_two_start_up_models_of_one_name_the_first_wins(start_server: StartServer) -> None:
    second = handler("return ['second']")
    server = start_server(
        archives={"first": handler("return ['first']"), "second": second},
        models=("m=first.mar", "m=second.mar", "other=second.mar"),
        default_workers_per_model=1,
    )
    server.saw("all start-up models are loaded")
    assert server.names() == ["m", "other"]
    assert server.predict("m").text == "first"
    assert server.output().count("'m' is used twice") == 1


def test_a_strict_ping_misses_a_start_up_model_until_it_is_registered_or_given_up(
    start_server: StartServer,
) -> None:
    server = start_server(
        archives={"good": PID},
        models=("good.mar", "gone=absent.mar", "late.mar"),
        default_workers_per_model=1,
        ping_mode="ready",
    )
    server.saw("some start-up models failed")
    assert server.names() == ["good"]
    assert server.ask("GET", "/ping").json() == {"status": "Unhealthy"}
    assert server.ask("GET", "/ping").status == 503
    server.load(server.add("late"))
    assert server.ask("GET", "/ping").status == 503
    assert server.unregister("gone").status == 200
    assert server.ask("GET", "/ping").status == 200
    assert server.unregister("gone").status == 404
    assert server.unregister("late").status == 200
    assert server.ask("GET", "/ping").status == 200


@pytest.mark.parametrize(("model", "name"), [("gone=absent.mar", "gone"), ("bad.mar", "bad")])
def test_a_start_that_must_not_fail_ends_the_server(
    start_server: StartServer, model: str, name: str
) -> None:
    server = start_server(
        archives={"bad": BAD, "good": PID},
        models=("good.mar", model),
        default_workers_per_model=1,
        fail_on_startup_error=True,
        wait=False,
    )
    assert server.exit_code() == 1
    assert f"Failed to load at start: {name}" in server.output()
    assert "Model server started." not in server.output()
    server.leaves_nothing()


def test_a_start_that_must_not_fail_waits_for_the_workers(start_server: StartServer) -> None:
    server = start_server(
        archives={"m": handler(load="time.sleep(0.3)")},
        models=("m.mar",),
        default_workers_per_model=1,
        fail_on_startup_error=True,
    )
    assert len(server.workers("m")) == 1


def test_archives_of_the_start_are_fetched_together(
    start_server: StartServer, slow_web: SlowWeb
) -> None:
    server = start_server(
        models=(f"a={slow_web.url}/a.mar", f"b={slow_web.url}/b.mar"),
        default_workers_per_model=1,
        wait=False,
    )
    eventually(lambda: len(slow_web.asked) == 2, what="both are asked for")
    slow_web.may_answer.set()
    server.saw("Model server started.")
    assert server.names() == ["a", "b"]


# Stops on the way


def test_a_stop_does_not_wait_for_archives_of_the_start(
    start_server: StartServer, slow_web: SlowWeb
) -> None:
    server = start_server(models=(f"a={slow_web.url}/a.mar",), wait=False)
    eventually(lambda: slow_web.asked, what="it is asked for")
    server.terminate()
    assert server.exit_code() == 0
    server.leaves_nothing()
    assert not list(server.tmp.iterdir())


def test_a_stop_does_not_wait_for_loads(start_server: StartServer) -> None:
    server = start_server(
        archives={"slow": SLOW}, models=("slow.mar",), default_workers_per_model=2
    )
    server.add("other", SLOW)
    with together() as run:
        loading = run(server.register, "other.mar", initial_workers=1, synchronous=True)
        eventually(lambda: "other" in server.names(), what="it is registered")
        server.terminate()
        assert server.exit_code() == 0
        assert loading.exception() is not None or loading.result().status >= 500
    server.leaves_nothing()


def test_a_stop_ends_a_start_that_waits_for_its_workers(start_server: StartServer) -> None:
    server = start_server(
        archives={"slow": SLOW},
        models=("slow.mar",),
        default_workers_per_model=1,
        fail_on_startup_error=True,
        log_to="stdout",
        wait=False,
    )
    server.saw("loading")
    server.terminate()
    assert server.exit_code() == 0
    server.leaves_nothing()
