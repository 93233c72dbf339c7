"""What the launcher and the front agree on."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config import launch
from mmserve.config.launch import SERVER_WORD, Arguments, parse_arguments
from mmserve.errors import ConfigurationError

FLAGS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("mms_config", "model_store", "models", "log_config"), st.text()),
        "ready_fd": st.integers(0, 1000),
    },
)


@given(FLAGS)
def test_the_front_reads_what_the_launcher_writes(flags):
    asked = Arguments(**flags)
    words = launch.front_command(asked)
    read = parse_arguments(words[words.index(SERVER_WORD) :])
    assert all(getattr(read, name) == getattr(asked, name) for name in Arguments.__slots__)


@pytest.mark.parametrize(
    "words", [["--nope"], ["--models"], ["--ready-fd", "x"], ["stray"], ["--ready-fd", "-1"]]
)
def test_a_command_line_that_is_none_is_refused(words):
    with pytest.raises(ConfigurationError):
        parse_arguments(words)


def test_the_front_is_isolated_from_the_current_directory():
    words = launch.front_command(Arguments())
    assert words[0] == sys.executable
    assert words[1:] == ["-I", "-m", "mmserve.serve", SERVER_WORD]


def test_a_server_installed_for_one_user_is_found_though_isolated(tmp_path):
    python = getattr(sys, "_base_executable", sys.executable)  # a venv has no user's packages
    environ = {"HOME": str(tmp_path)}

    def ask(*words: str) -> str:
        command = [python, *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if ask("-c", "import site; print(site.ENABLE_USER_SITE)") != "True":
        pytest.skip("this Python has no packages of the user's own")
    package = Path(ask("-c", "import site; print(site.getusersitepackages())")) / "mmserve"
    shutil.copytree(Path(launch.__file__).parents[1], package)
    flags = ask("-c", "from mmserve.config.launch import *; print(*isolated_python()[1:])").split()
    assert ask(*flags, "-c", "import mmserve; print(mmserve.__file__)") == f"{package}/__init__.py"
    assert "-I" not in flags


def test_ready_is_said_once_and_the_descriptor_is_closed():
    read_fd, write_fd = os.pipe()
    launch.announce_ready(write_fd)
    assert os.read(read_fd, 100) == launch.READY
    assert os.read(read_fd, 100) == b""
    os.close(read_fd)
    with pytest.raises(OSError):
        os.fstat(write_fd)


def test_a_launcher_that_has_gone_does_not_harm_the_server():
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    launch.announce_ready(write_fd)
    launch.announce_ready(None)


@pytest.mark.parametrize("given", [("TMPDIR",), ("TEMP",), ("TMP",), ("TMP", "TMPDIR"), ()])
def test_the_temporary_folder_is_pythons(tmp_path, given):
    for name in given:
        (tmp_path / name).mkdir()
    environ = {name: str(tmp_path / name) for name in given}
    code = "import tempfile; print(tempfile.gettempdir())"
    said = subprocess.run(
        [sys.executable, "-I", "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert launch.temp_dir(environ) == said.stdout.strip()


def test_a_folder_that_is_none_is_passed_over(tmp_path):
    environ = {"TMPDIR": str(tmp_path / "gone"), "TEMP": str(tmp_path)}
    assert launch.temp_dir(environ) == str(tmp_path)


def test_the_pid_file_holds_the_number_alone_and_is_made_once(tmp_path):
    path = launch.pid_file({"TMPDIR": str(tmp_path)})
    assert path == str(tmp_path / ".model_server.pid")
    assert launch.read_pid(path) is None
    launch.write_pid(path, 1234)
    assert (tmp_path / ".model_server.pid").read_bytes() == b"1234"
    assert launch.read_pid(path) == 1234
    with pytest.raises(FileExistsError):
        launch.write_pid(path, 1235)


@pytest.mark.parametrize("content", [b"", b"x", b"-5", b"12 13", b"9" * 100, b"\xff"])
def test_a_pid_file_without_a_pid_reads_as_none_that_lives(tmp_path, content):
    path = tmp_path / ".model_server.pid"
    path.write_bytes(content)
    assert launch.read_pid(str(path)) == 0


def test_a_server_removes_its_own_pid_file_only(tmp_path):
    environ = {"TMPDIR": str(tmp_path)}
    path = launch.pid_file(environ)
    launch.write_pid(path, os.getpid() + 1)
    launch.remove_own_pid_file(environ)
    assert launch.read_pid(path) == os.getpid() + 1
    launch.remove_pid(path, os.getpid() + 1)
    launch.write_pid(path, os.getpid())
    launch.remove_own_pid_file(environ)
    assert launch.read_pid(path) is None
    launch.remove_own_pid_file(environ)
