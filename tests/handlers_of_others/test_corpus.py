"""Plays every handler of this directory to a real worker process; README.md says how to add one."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmserve.wire.messages import Loaded
from tests.runtime.workers import FORK, FRESH, Answer, Process, Request

HERE = Path(__file__).parent
CASES = sorted(path.parent for path in HERE.glob("*/exchanges.json"))
DIED = "Worker died."


def content(value: Any) -> bytes:
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else value.encode()


def request(send: dict[str, Any], number: int) -> Request:
    kind = send.get("content_type", "")
    headers = [*send.get("headers", {}).items(), *([("Content-Type", kind)] if kind else [])]
    return Request(content(send["body"]), kind, headers, id=f"id-{number}")


def check(answer: Answer, expected: dict[str, Any]) -> None:
    outcome = answer.outcome
    assert outcome.status == expected["status"], outcome
    if "message" in expected:
        assert outcome.error is not None and outcome.error.startswith(expected["message"])
    if "text" in expected:
        assert answer.text == expected["text"]
    if "json" in expected:
        assert json.loads(answer.text) == expected["json"]
    if "base64" in expected:
        assert answer.body == content(expected)
    sent = {name.lower(): value for name, value in outcome.headers}
    for name, value in expected.get("headers", {}).items():
        assert sent[name.lower()] == value


@pytest.mark.parametrize("command", [["-c", FORK], FRESH], ids=["fork", "fresh"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_handler_of_others_is_served(case: Path, command: list[str], tmp_path: Path) -> None:
    directory = shutil.copytree(case, tmp_path / case.name)
    played = json.loads((directory / "exchanges.json").read_text())
    manifest = (directory / "MAR-INF" / "MANIFEST.json").read_text()
    steps = list(played["steps"])
    lives = 0
    while steps:
        lives += 1
        with Process(tmp_path / f"process-{lives}", command) as worker:
            worker.hello()
            loaded = worker.load(
                directory,
                json.loads(manifest)["model"]["handler"],
                model_name=case.name,
                batch_size=played.get("batch_size", 1),
                manifest=manifest,
            )
            assert isinstance(loaded, Loaded), loaded
            while steps:
                step = steps.pop(0)
                worker.send(*[request(one["send"], at) for at, one in enumerate(step)])
                if any(one["answer"].get("message") == DIED for one in step):
                    assert worker.recv() is None
                    assert worker.exit_code() != 0
                    break
                _, answers = worker.replies()
                for one, answer in zip(step, answers, strict=True):
                    check(answer, one["answer"])
            else:
                assert worker.end() == 0


def test_every_handler_says_what_shape_it_has() -> None:
    assert len(CASES) >= 20
    for case in CASES:
        played = json.loads((case / "exchanges.json").read_text())
        assert played["shape"].endswith("."), case
        assert played["steps"], case
