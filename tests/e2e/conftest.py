"""Servers for end-to-end tests: real processes on ports that the kernel chooses."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server

StartServer = Callable[..., Server]


@pytest.fixture
def home() -> Iterator[Path]:
    """A private folder with a short path, for unix sockets have 107 bytes; removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="mmserve-e2e-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def start_server(home: Path) -> Iterator[StartServer]:
    """`start_server(job_queue_size=2)` starts a server with these settings and waits for it.

    `archives`, `models`, `env` and `prefix` are those of `Server`; `folder` names the home of an
    earlier server; with `wait=False` it is not waited for. All are ended after the test, and each
    of their processes.
    """
    servers: list[Server] = []

    def start(
        *,
        folder: Path | None = None,
        archives: dict[str, str] | None = None,
        models: tuple[str, ...] = (),
        env: dict[str, str | None] | None = None,
        prefix: tuple[str, ...] = (),
        wait: bool = True,
        **properties: Any,
    ) -> Server:
        place = folder or home / f"s{len(servers)}"
        server = Server(place, properties, archives=archives, models=models, env=env, prefix=prefix)
        servers.append(server)
        if wait:
            server.saw("Model server started.")
        return server

    yield start
    for server in servers:
        server.close()
