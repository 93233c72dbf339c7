"""Runs every command that the docs show, page by page, and compares what it prints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.documents import Command, commands, looks_like, pages
from tests.e2e.server import MARK, marked
from tests.free_ports import free_ports

WITH_COMMANDS = [page for page in pages() if commands(page.read_text())]


class Shell:
    """One bash that keeps its directory and variables from command to command."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=home,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, text: str) -> tuple[int, str]:
        """Exit code and output of commands."""
        assert self._bash.stdin is not None and self._bash.stdout is not None
        end = uuid.uuid4().hex
        self._bash.stdin.write(f"{text}\necho {end} $?\n")
        self._bash.stdin.flush()
        said: list[str] = []
        for line in self._bash.stdout:
            before, found, code = line.partition(end)
            if found:
                return int(code), "".join([*said, before])
            said.append(line)
        raise AssertionError(f"the shell ended: {''.join(said)}")

    def close(self) -> None:
        os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait(10)
        for stream in (self._bash.stdin, self._bash.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def ports() -> dict[str, str]:
    """The ports in the docs, and free ones in their place."""
    return dict(zip(("8080", "8081"), map(str, free_ports(2)), strict=True))


@pytest.fixture
def shell(tmp_path: Path, ports: dict[str, str]) -> Iterator[Shell]:
    """In an empty folder, with the commands of this environment first on PATH."""
    home, temp = tmp_path / "home", tmp_path / "temp"
    home.mkdir()
    temp.mkdir()
    (home / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{ports['8080']}\n"
        f"management_address=http://127.0.0.1:{ports['8081']}\n"
        "preload_imports=none\n"
    )
    run = uuid.uuid4().hex
    env = {key: value for key, value in os.environ.items() if not key.startswith("MMS_")}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", MARK: run}
    env |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temp))
    made = Shell(home, env)
    yield made
    made.close()
    left = marked(run)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"the page leaves processes behind: {left}"


@pytest.mark.documented
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=str)
def test_commands_do_what_the_page_shows(page: Path, shell: Shell, ports: dict[str, str]) -> None:
    for command in commands(page.read_text()):
        _check(page, command, shell, ports)


def _check(page: Path, command: Command, shell: Shell, ports: dict[str, str]) -> None:
    text, shown = command.text, command.output
    for documented, real in ports.items():
        text = text.replace(f":{documented}", f":{real}")
        shown = shown and shown.replace(f":{documented}", f":{real}")
    code, output = shell.run(text)
    where = f"{page}:{command.line}: {text}"
    assert code == 0, f"{where}\nexit code {code}\n{output}"
    if shown is not None:
        assert looks_like(output, shown), f"{where}\nthe page shows:\n{shown}\nit prints:\n{output}"
