from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.runtime.workers import FRESH, Process


@pytest.fixture
def model(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Writes a model directory: path → source text."""

    def write(files: Mapping[str, str]) -> Path:
        directory = tmp_path / "model"
        for name, source in files.items():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(dedent(source))
        return directory

    return write


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts worker processes that end with the test."""
    with contextlib.ExitStack() as stack:
        count = 0

        def start(
            command: Sequence[str] = FRESH,
            *,
            env: Mapping[str, str] | None = None,
            more_wires: int = 0,
        ) -> Process:
            nonlocal count
            count += 1
            home = tmp_path / f"process-{count}"
            return stack.enter_context(Process(home, command, env=env, more_wires=more_wires))

        yield start


@pytest.fixture
def serve(
    model: Callable[[Mapping[str, str]], Path], start: Callable[..., Process]
) -> Callable[..., Process]:
    """A worker with the model loaded whose `service.py` is given, as statements of `handle`."""

    def serve(body: str, *, setup: str = "", **fields: Any) -> Process:
        indented = dedent(body).strip().replace("\n", "\n    ")
        source = (
            f"{dedent(setup)}\n"
            "def handle(data, context):\n"
            "    if data is None:\n"
            "        return\n"
            "    body = data[0].get('body')\n"
            f"    {indented}\n"
        )
        process = start()
        process.hello()
        loaded = process.load(model({"service.py": source}), **fields)
        assert not hasattr(loaded, "cause"), loaded
        return process

    return serve
