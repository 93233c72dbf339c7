"""Processes that are not our children."""

import os
import signal
import subprocess
import sys

import pytest

from mmserve.platform import OtherProcess

COMMAND = [sys.executable, "-c", "print(flush=True); input()", "a word"]


@pytest.fixture
def sleeper(tmp_path):
    environ = {**os.environ, "OF_THE_SLEEPER": "a=b"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(COMMAND, cwd=tmp_path, env=environ, **pipes) as process:
        process.stdout.readline()  # now it is what its command line says
        yield process
        process.kill()


def test_it_is_known_by_its_command_line_environment_and_folder(sleeper, tmp_path):
    with OtherProcess(sleeper.pid) as other:
        assert other.command_line() == COMMAND
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
