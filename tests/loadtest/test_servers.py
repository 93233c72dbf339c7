"""Servers under test are started and stopped, with all they left."""

import json
import sys
from pathlib import Path

import pytest

from mmserve_loadtest.client import call
from mmserve_loadtest.servers import ServerFailed, Subject, free_ports, mms, running

STAND_IN = Path(__file__).with_name("standin.py")


@pytest.fixture
def subject() -> Subject:
    return Subject(
        name="stand-in", command=(sys.executable, str(STAND_IN)), version="1", env={"GIVEN": "yes"}
    )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_server_is_stopped_with_what_left_its_process_group(
    subject: Subject, tmp_path: Path
) -> None:
    with running(subject, tmp_path, properties={"job_queue_size": 7}) as server:
        told = json.loads(call("GET", server.inference + "/ping").body)
        pids = server.pids()
        assert told["child"] in pids
        assert all(is_alive(pid) for pid in pids)
        assert told["store"] == str(tmp_path)
        assert told["settings"]["job_queue_size"] == "7"
        assert told["env"]["GIVEN"] == "yes"
        assert Path(told["cwd"]) == server.home
    assert not any(is_alive(pid) for pid in pids)
    assert not server.home.exists()


def test_a_server_is_stopped_when_the_measurement_fails(subject: Subject, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), running(subject, tmp_path) as server:
        pids = server.pids()
        raise RuntimeError
    assert not any(is_alive(pid) for pid in pids)


def test_settings_of_the_caller_do_not_reach_the_server(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MMS_JOB_QUEUE_SIZE", "SAGEMAKER_MULTI_MODEL", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    with running(subject, tmp_path, models=("a=a.mar",)) as server:
        told = json.loads(call("GET", server.inference + "/ping").body)
    assert not {"MMS_JOB_QUEUE_SIZE", "SAGEMAKER_MULTI_MODEL", "PYTHONPATH"} & told["env"].keys()
    assert told["env"]["TEMP"].startswith(str(server.home))
    assert told["argv"][-2:] == ["--models", "a=a.mar"]


def test_a_management_call_that_fails_says_what_was_answered(
    subject: Subject, tmp_path: Path
) -> None:
    with running(subject, tmp_path) as server:
        assert server.manage("GET", "/models").status == 200
        with pytest.raises(ServerFailed, match="stand-in: GET /broken: 500"):
            server.manage("GET", "/broken")


def test_a_server_that_ends_at_start_fails_with_its_output(tmp_path: Path) -> None:
    ends = Subject(name="short", command=(sys.executable, "-c", "print('no luck')"), version="1")
    with pytest.raises(ServerFailed, match="no luck"), running(ends, tmp_path):
        pass


def test_a_server_that_never_answers_fails_in_time(tmp_path: Path) -> None:
    silent = Subject(
        name="silent",
        command=(sys.executable, "-c", "__import__('signal').pause()"),
        version="1",
    )
    with (
        pytest.raises(ServerFailed, match="did not answer"),
        running(silent, tmp_path, limit_s=0.5),
    ):
        pass


def test_a_missing_oracle_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MMS_ORACLE", raising=False)
    with pytest.raises(ServerFailed, match="make oracle"):
        mms("/nowhere/multi-model-server")


def test_a_missing_java_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(ServerFailed, match="Java"):
        mms(sys.executable)


def test_free_ports_are_distinct_and_low_enough_for_every_server() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert max(ports) < 32_767
