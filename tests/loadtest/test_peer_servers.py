"""Peers are installed, started, measured, and left out where that fails."""

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmserve_loadtest import processes
from mmserve_loadtest.main import main
from mmserve_loadtest.overhead import overhead
from mmserve_loadtest.peer_servers import PeerMissing, install, last_words, running_peer
from mmserve_loadtest.peers import Peer, Place, Request, Setup, Workload, noop
from mmserve_loadtest.progress import Ticker
from mmserve_loadtest.results import Results
from mmserve_loadtest.servers import Subject

STAND_IN = Path(__file__).with_name("peer_standin.py")
FOREVER = 1 << 40


class StandInPeer(Peer):
    """Installed from a wheel made here, so that no registry is asked."""

    distribution = "stand-in-peer"

    def __init__(
        self,
        title: str = "stand-in",
        *,
        serves: int = FOREVER,
        wheel: Path | str = "",
        java: bool = False,
    ) -> None:
        self.name, self.title, self._serves, self.needs_java = "stand-in", title, serves, java
        self.alone = (str(wheel),) if wheel else ()

    def setup(self, workload: Workload, place: Place) -> Setup:
        return Setup(
            command=(
                *(str(place.venv / "bin/python"), "server.py"),
                *(str(place.ports[0]), str(self._serves)),
            ),
            files={"bench_model.py": workload.source.encode()},
            links={"server.py": place.venv / "server.py"},
            env={"PYTHONPATH": str(place.home)},
        )

    def request(self, workload: Workload) -> Request:
        return Request(path="/ask", body=workload.body)


def write_wheel(folder: Path) -> Path:
    wheel = folder / "stand_in_peer-2.5-py3-none-any.whl"
    about = "stand_in_peer-2.5.dist-info"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: stand-in-peer\nVersion: 2.5\n"
        )
        packed.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        packed.writestr("stand_in_peer-2.5.data/data/server.py", STAND_IN.read_text())
        packed.writestr(f"{about}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the stand-in installed."""
    folder = tmp_path_factory.mktemp("peers")
    said: list[str] = []
    install(StandInPeer(wheel=wheel), folder, said.append)
    assert len(said) == 1
    assert "installing stand-in into" in said[0]
    return folder


def test_a_peer_is_installed_once(folder: Path, wheel: Path) -> None:
    said: list[str] = []
    assert install(StandInPeer(wheel=wheel), folder, said.append) == folder / "stand-in"
    assert said == []


def test_a_peer_that_cannot_be_installed_says_why_and_is_tried_again(tmp_path: Path) -> None:
    for _ in range(2):
        said: list[str] = []
        with pytest.raises(PeerMissing, match=r"cannot be installed: ERROR: .*nowhere"):
            install(StandInPeer(wheel=tmp_path / "nowhere.whl"), tmp_path, said.append)
        assert len(said) == 1


def test_a_peer_that_needs_java_is_not_installed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(PeerMissing, match="Java"):
        install(StandInPeer(java=True), tmp_path, print)
    assert not list(tmp_path.iterdir())


def test_a_peer_answers_with_the_workload_and_is_stopped(folder: Path) -> None:
    with running_peer(StandInPeer(), folder / "stand-in", noop(b"x")) as server:
        assert server.answers()
        assert server.version == "2.5"
        pids = server.pids()
        assert pids
    assert not [pid for pid in pids if processes.of_run("", pid)]
    assert not server.home.exists()


def test_a_peer_that_ends_at_start_says_why_in_a_line(folder: Path) -> None:
    wanted = pytest.raises(PeerMissing, match=r"RuntimeError: it does not want to$")
    with wanted, running_peer(StandInPeer(serves=0), folder / "stand-in", noop(b"x")):
        pass


def test_a_peer_whose_installation_lacks_a_file_is_missing(tmp_path: Path) -> None:
    wanted = pytest.raises(PeerMissing, match=r"no server\.py")
    with wanted, running_peer(StandInPeer(), tmp_path, noop(b"x")):
        pass


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("a\nb\n\n", "b"),
        ("", "it said nothing"),
        (
            "Traceback\n  ModuleNotFoundError: No module named 'x'\nstopping\n",
            "No module named 'x'",
        ),
    ],
)
def test_the_last_words_are_those_that_say_why(output: str, told: str) -> None:
    assert last_words(output).endswith(told)


@pytest.fixture
def ours() -> Iterator[Subject]:
    stand_in = Path(__file__).with_name("standin.py")
    yield Subject(name="mmserve", command=(sys.executable, str(stand_in)), version="1")


def measured(
    ours: Subject, against: list[Subject | Peer], peers: Path, out: Path
) -> tuple[int, list[dict[str, Any]]]:
    status = overhead(
        ours,
        against,
        Results(out),
        Ticker(),
        peers=peers,
        rounds=1,
        most_rounds=1,
        duration_s=0.1,
        warm_s=0.1,
    )
    return status, [json.loads(line) for line in out.read_text().splitlines()]


def test_peers_are_measured_in_turn_and_have_no_part_in_the_exit_status(
    ours: Subject, folder: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = measured(ours, [StandInPeer(wheel=wheel)], folder, tmp_path / "o.jsonl")
    assert status == 0
    loads = [(line["server"], line["plan"]["connections"]) for line in lines if "plan" in line]
    assert sorted(loads) == sorted(
        (name, n) for name in ("mmserve", "stand-in") for n in (1, 16, 64)
    )
    compared = [line for line in lines if line["kind"] == "overhead"]
    assert [line["measure"]["bar"] for line in compared] == [None] * 3
    assert compared[0]["servers"] == {"mmserve": "1", "stand-in": "2.5"}
    assert "p50 stand-in" in capsys.readouterr().out


def test_what_cannot_be_installed_started_or_measured_is_left_out_with_its_reason(
    ours: Subject, folder: Path, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    against: list[Subject | Peer] = [
        StandInPeer("java-less", java=True, wheel=wheel),
        StandInPeer("unwilling", serves=0, wheel=wheel),
        StandInPeer("tired", serves=2, wheel=wheel),
        StandInPeer("steady", wheel=wheel),
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAVA_HOME", "/nowhere")
        status, lines = measured(ours, against, folder, tmp_path / "o.jsonl")
    assert status == 0
    reasons = {line["server"]: line["reason"] for line in lines if line["kind"] == "left out"}
    assert reasons.keys() == {"java-less", "unwilling", "tired"}
    assert "Java" in reasons["java-less"]
    assert "it does not want to" in reasons["unwilling"]
    assert "statuses {500:" in reasons["tired"].replace("200: 2, ", "").replace("{200: 1, ", "{")
    told = capsys.readouterr().out
    assert all(f"left out: {name}: " in told for name in reasons)
    assert "steady" in told


def test_one_bar_is_for_multi_model_server_alone(
    ours: Subject, folder: Path, wheel: Path, tmp_path: Path
) -> None:
    mms = Subject(name="MMS", command=ours.command, version="1")
    status, lines = measured(ours, [mms, StandInPeer(wheel=wheel)], folder, tmp_path / "o.jsonl")
    assert status == 3  # one round says nothing about a bar
    bars = {
        tuple(sorted(line["servers"])): line["measure"]["bar"]
        for line in lines
        if line["kind"] == "overhead"
    }
    assert bars == {("MMS", "mmserve"): 4.0, ("mmserve", "stand-in"): None}


@pytest.mark.parametrize(
    ("named", "said"), [("mms,nginx", "nginx is none of mms"), (",", "no server")]
)
def test_unknown_peers_are_told_in_a_line(
    named: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_command = ["overhead", "--mmserve", "true", "--against", named]
    assert main(with_command) == 2
    assert said in capsys.readouterr().err
