"""Plays scripts to a running server and keeps what it answers."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmserve_loadtest.client import BadReply, Connection, NoReply
from mmserve_loadtest.http import Reply, parse_url, request_bytes
from mmserve_loadtest.servers import Server, ServerFailed

from .archives import NOOP, Files, archive, zipped
from .comparing import Outcome
from .exchanges import Clear, Exchange, Gone, Script, Settle

WAIT_LIMIT_S = 20.0
WAIT_PAUSE_S = 0.1


def write_store(path: Path, entries: Mapping[str, Files | bytes]) -> None:
    for name, content in entries.items():
        files = (
            {name: content}
            if isinstance(content, bytes)
            else {f"{name}/{inner}": text for inner, text in content.items()}
        )
        for inner, text in files.items():
            target = path / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text if isinstance(text, bytes) else text.encode())


class _Files(http.server.BaseHTTPRequestHandler):
    """Archives to download, and ways to fail at it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status, body = {
            "/noop.mar": (200, zipped(archive("noop", NOOP) | {"mark.txt": "remote"})),
            "/moved.mar": (302, b""),
            "/500": (500, b"broken"),
            "/page.mar": (200, b"<html><body>a page</body></html>"),
            "/empty.mar": (200, b""),
        }.get(self.path, (404, b"absent"))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/noop.mar")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _FileServer(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that leaves early is none of our business."""


@contextlib.contextmanager
def files() -> Iterator[str]:
    """A server of files. Gives its `http://127.0.0.1:PORT`."""
    server = _FileServer(("127.0.0.1", 0), _Files)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


#: What came of every exchange, by the names of script and exchange.
Transcript = dict[tuple[str, str], list[Outcome]]


def play(server: Server, scripts: Iterable[Script], files_url: str) -> Transcript:
    """Every step of every script, in order."""
    heard: Transcript = {}
    with ThreadPoolExecutor(16) as crowd:
        for script in scripts:
            for step in script.steps:
                match step:
                    case Exchange():
                        asked = [
                            crowd.submit(ask, server, step, files_url) for _ in range(step.times)
                        ]
                        told = [each.result() for each in asked]
                        heard[script.name, step.name] = sorted(told, key=_order)
                    case Settle(model, body):
                        _wait(
                            server, _PREDICT._replace(path=f"/predictions/{model}", body=body), 200
                        )
                    case Gone(model):
                        _wait(server, _DESCRIBE._replace(path=f"/models/{model}"), 404)
                    case Clear(model):
                        _clear(server, model)
    return heard


_PREDICT = Exchange("settle", "POST", "", headers=(("Content-Type", "text/plain"),), limit_s=5)
_DESCRIBE = Exchange("gone", "GET", "", api="management")
_CLEAR = Exchange("clear", "DELETE", "", api="management")


def _wait(server: Server, exchange: Exchange, status: int) -> None:
    """Asks until the answer has this status. Raises ServerFailed when it never has."""
    until = time.monotonic() + WAIT_LIMIT_S
    while time.monotonic() < until:
        answer = ask(server, exchange, "")
        if isinstance(answer, Reply) and answer.status == status:
            return
        time.sleep(WAIT_PAUSE_S)
    raise ServerFailed(
        f"{server.subject.name}: {exchange.method} {exchange.path} is never {status}: {answer}\n"
        f"{server.output()[-2000:]}"
    )


def _clear(server: Server, model: str) -> None:
    """Unregisters until it is unknown: Multi Model Server may put it back once, when it was just
    taking it out by itself. Raises ServerFailed when it stays."""
    until = time.monotonic() + WAIT_LIMIT_S
    while time.monotonic() < until:
        ask(server, _CLEAR._replace(path=f"/models/{model}"), "")
        answer = ask(server, _DESCRIBE._replace(path=f"/models/{model}"), "")
        if isinstance(answer, Reply) and answer.status == 404:
            return
        time.sleep(WAIT_PAUSE_S)
    raise ServerFailed(f"{server.subject.name}: {model} cannot be unregistered")


def ask(server: Server, exchange: Exchange, files_url: str) -> Outcome:
    """One request on a connection of its own: the reply, or why there is none."""
    base = server.management if exchange.api == "management" else server.inference
    target = parse_url(base)
    path = exchange.path.replace("{files}", files_url)
    request = exchange.raw
    body = exchange.body.replace(b"{files}", files_url.encode())
    if request is None:
        request = request_bytes(exchange.method, target._replace(path=path), body, exchange.headers)
    method = request.partition(b" ")[0]
    try:
        with Connection((target.host, target.port), timeout_s=exchange.limit_s) as connection:
            connection.send(request)
            return connection.reply(bodiless=method == b"HEAD")
    except NoReply as failed:
        return str(failed)
    except BadReply:
        return "not HTTP"
    except OSError as failed:
        return f"no connection: {failed.strerror}"


def _order(outcome: Outcome) -> tuple[int, bytes]:
    return (outcome.status, outcome.body) if isinstance(outcome, Reply) else (0, outcome.encode())
