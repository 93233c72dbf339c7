"""Processes that are not our children."""

import os
import signal
import subprocess
import sys

import pytest

from mmserve.platform import OtherProcess


@pytest.fixture
def sleeper(tmp_path):
    environ = {**os.environ, "OF_THE_SLEEPER": "a=b"}
    command = [sys.executable, "-c", "input()", "a word"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_it_is_known_by_its_command_line_environment_and_folder(sleeper, tmp_path):
    with OtherProcess(sleeper.pid) as other:
        assert other.command_line() == [sys.executable, "-c", "input()", "a word"]
        assert other.environ()["OF_THE_SLEEPER"] == "a=b"
        assert other.cwd() == str(tmp_path)


def test_its_end_is_seen_though_nobody_has_reaped_it(sleeper):
    with OtherProcess(sleeper.pid) as other:
        assert not other.wait(0.01)
        other.signal(signal.SIGTERM)
        assert other.wait(30)
        assert other.has_ended()
        assert other.command_line() == []


def test_a_pid_that_nobody_has_is_an_error(sleeper):
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(ProcessLookupError):
        OtherProcess(sleeper.pid)


def test_one_that_was_reaped_is_not_mistaken_for_another(sleeper):
    with OtherProcess(sleeper.pid) as other:
        sleeper.kill()
        sleeper.wait()
        assert other.has_ended()
        assert other.environ() == {}
        assert other.cwd() == "/"
        with pytest.raises(ProcessLookupError):
            other.signal(signal.SIGTERM)


def test_closing_twice_does_no_harm(sleeper):
    other = OtherProcess(sleeper.pid)
    other.close()
    other.close()
