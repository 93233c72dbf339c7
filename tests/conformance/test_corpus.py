"""The handlers of others, asked over HTTP: both servers answer as their `exchanges.json` says."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mmserve_loadtest.client import Connection
from mmserve_loadtest.http import Reply, parse_url, request_bytes
from mmserve_loadtest.servers import Server, Subject, running

from .conftest import Account

pytestmark = [pytest.mark.java, pytest.mark.timeout(300)]

CORPUS = Path(__file__).parents[1] / "handlers_of_others"
CASES = sorted(path.parent.name for path in CORPUS.glob("*/exchanges.json"))
REPLY_LIMIT_S = 20.0
BATCH_DELAY_MS = 2000
STAGGER_S = 0.05
#: Handlers that Multi Model Server is not asked about, for it answers by chance.
BY_CHANCE_THERE = {"starts_processes"}  # every fifth request or so hangs in the forked pool


@pytest.fixture(scope="module")
def servers(subjects: tuple[Subject, Subject]) -> Iterator[tuple[Server, Server]]:
    ours, theirs = subjects
    with running(theirs, CORPUS) as other, running(ours, CORPUS) as mine:
        yield mine, other


@pytest.mark.parametrize("case", CASES)
def test_a_handler_of_others_answers_alike(
    case: str, servers: tuple[Server, Server], account: Account
) -> None:
    played = json.loads((CORPUS / case / "exchanges.json").read_text(encoding="utf-8"))
    asked = servers[:1] if case in BY_CHANCE_THERE else servers
    with ThreadPoolExecutor(2) as both:
        heard = list(both.map(lambda server: play(server, case, played), asked))
    wrong = [
        f"{server.subject.name}, step {at + 1}, exchange {number + 1}: {miss}"
        for server, replies in zip(asked, heard, strict=True)
        for at, step in enumerate(played["steps"])
        for number, one in enumerate(step)
        for miss in misses(replies[at][number], expected(server, one))
    ]
    assert not wrong, "\n".join(wrong)
    account.corpus += sum(len(step) for step in played["steps"])


def expected(server: Server, one: dict[str, Any]) -> dict[str, Any]:
    """What this server should answer."""
    answer: dict[str, Any] = one["answer"]
    return one.get("mms", answer) if server.subject.name == "MMS" else answer


def play(server: Server, case: str, played: dict[str, Any]) -> list[list[Reply]]:
    size = played.get("batch_size", 1)
    query = f"url={case}&model_name={case}&batch_size={size}&max_batch_delay={BATCH_DELAY_MS}"
    server.manage("POST", f"/models?{query}&initial_workers=1&synchronous=true")
    try:
        return [send(server, case, [one["send"] for one in step]) for step in played["steps"]]
    finally:
        server.manage("DELETE", f"/models/{case}")


def send(server: Server, case: str, asked: list[dict[str, Any]]) -> list[Reply]:
    """Requests that make one batch, in the order of the list."""
    target = parse_url(f"{server.inference}/predictions/{case}")
    open_: list[Connection] = []
    try:
        for one in asked:
            headers = dict(one.get("headers", {}))
            if kind := one.get("content_type"):
                headers["Content-Type"] = kind
            if open_:
                # Multi Model Server reads its connections on several threads: a place in the
                # batch is certain only for what came clearly before.
                time.sleep(STAGGER_S)
            open_.append(Connection((target.host, target.port), timeout_s=REPLY_LIMIT_S))
            open_[-1].send(request_bytes("POST", target, content(one["body"]), headers))
        return [connection.reply() for connection in open_]
    finally:
        for connection in open_:
            connection.close()


def misses(reply: Reply, expected: dict[str, Any]) -> list[str]:
    """How a reply differs from what was expected of it."""
    found = []
    if reply.status != expected["status"]:
        return [f"status {reply.status}, not {expected['status']}: {reply.body[:300]!r}"]
    if "message" in expected:
        message = json.loads(reply.body)["message"]
        if not message.startswith(expected["message"]):
            found.append(f"message {message!r}, not {expected['message']!r}")
    if "text" in expected and reply.body.decode() != expected["text"]:
        found.append(f"text {reply.body!r}, not {expected['text']!r}")
    if "json" in expected and json.loads(reply.body) != expected["json"]:
        found.append(f"json {reply.body!r}, not {expected['json']!r}")
    if "base64" in expected and reply.body != content(expected):
        found.append(f"body {reply.body!r}")
    for name, value in expected.get("headers", {}).items():
        if reply.header(name) != value:
            found.append(f"{name}: {reply.header(name)!r}, not {value!r}")
    return found


def content(value: Any) -> bytes:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value.encode()
