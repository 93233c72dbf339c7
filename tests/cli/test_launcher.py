"""`multi-model-server`, with a stand-in where the server would be."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mmserve.cli import launcher
from mmserve.config.launch import SERVER_WORD
from mmserve.platform import OtherProcess

STANDIN = Path(__file__).with_name("standin.py")

#: Runs the launcher with another interpreter for the front: a script that is the stand-in.
DRIVER = """\
import os, sys
from mmserve.cli import launcher
sys.executable = sys.argv.pop(1)
sys.exit({call})
"""


class Shell:
    """Runs the launcher's commands in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid_file = folder / ".model_server.pid"
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        coverage = {name: v for name, v in os.environ.items() if name.startswith("COVERAGE_")}
        self.environ = {**kept, **coverage, "TMPDIR": str(folder)}

    def front(self, behaviour: str) -> str:
        """An interpreter whose every program is the stand-in."""
        path = self.folder / f"python-{behaviour}"
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STANDIN}" {behaviour} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    def start(self, *flags: str, front: str = "ready", call: str = "launcher.main()", **environ):
        """The running command."""
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER.format(call=call), self.front(front), *flags],
            cwd=self.folder,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *flags: str, **options) -> tuple[int, str]:
        """Exit code and output of a command, and of what it leaves behind."""
        with self.start(*flags, **options) as process:
            said, _ = process.communicate()
            return process.returncode, said

    def start_in_background(self, front: str = "ready") -> int:
        """The pid of a server that is ready."""
        with self.start("--start", front=front) as process:
            said, _ = process.communicate()  # the server does not keep the pipe
            assert (process.returncode, said) == (0, "Model server started.\n")
        return int(self.pid_file.read_text())


@pytest.fixture
def shell(tmp_path):
    shell = Shell(tmp_path)
    yield shell
    with (
        contextlib.suppress(OSError, ValueError),
        OtherProcess(int(shell.pid_file.read_text())) as left,
    ):
        if SERVER_WORD in left.command_line():
            left.signal(signal.SIGKILL)


# Start in the background


def test_a_start_returns_once_the_server_is_ready(shell):
    pid = shell.start_in_background()
    assert shell.pid_file.read_bytes() == str(pid).encode()
    with OtherProcess(pid) as server:
        assert SERVER_WORD in server.command_line()
        assert os.getsid(pid) == pid


def test_a_second_start_is_refused_and_harms_nothing(shell):
    pid = shell.start_in_background()
    code, said = shell.run("--start")
    assert code == 1
    assert said.startswith("Model server is already running")
    assert "--stop" in said
    with OtherProcess(pid) as server:
        assert not server.has_ended()


@pytest.mark.parametrize(("front", "code"), [("fails", 3), ("crashes", 128 + 9)])
def test_a_server_that_cannot_start_gives_the_command_its_exit_code(shell, front, code):
    assert shell.run("--start", front=front)[0] == code
    assert not shell.pid_file.exists()


def test_without_a_flag_the_server_is_started(shell):
    code, said = shell.run(front="echo")
    assert code == 7
    assert json.loads(said)["given"]["ready_fd"] is not None


def test_what_a_server_in_the_background_writes_goes_to_a_file_of_the_log_folder(shell):
    logs = shell.folder / "elsewhere" / "logs"
    (shell.folder / "config.properties").write_text(f"log_location={logs}")
    pid = shell.start_in_background()
    assert shell.run("--stop")[0] == 0
    assert (logs / "console.log").read_text() == f"started {pid}\n"
    again = shell.start_in_background()
    assert shell.run("--stop")[0] == 0
    assert (logs / "console.log").read_text() == f"started {pid}\nstarted {again}\n"


def test_a_start_that_fails_shows_what_the_server_said_this_time(shell):
    console = shell.folder / "logs" / "console.log"
    console.parent.mkdir()
    console.write_text("of another day\n")
    code, said = shell.run("--start", front="chatty")
    assert code == 7
    first, *lines = said.splitlines()
    assert first.endswith("logs/console.log:")
    assert lines[-1] == "line 3999"
    assert len(said) < 20_000
    assert console.read_text().startswith("of another day\nline 0\n")


@pytest.mark.parametrize("obstacle", ["logs", "console.log"])
def test_without_a_log_folder_the_output_is_thrown_away_and_that_is_said(shell, obstacle):
    if obstacle == "logs":
        (shell.folder / "logs").touch()
    else:
        (shell.folder / "logs" / "console.log").mkdir(parents=True)
    code, said = shell.run("--start", front="echo")
    assert code == 7
    assert "What it said is lost" in said
    assert "--foreground" in said
    code, said = shell.run("--start")
    assert code == 0
    assert said.endswith("Model server started.\n")
    assert ("Nothing is logged: logs cannot be written" in said) == (obstacle == "logs")
    assert shell.run("--stop")[0] == 0


def test_a_wrong_setting_ends_the_start(shell):
    (shell.folder / "config.properties").write_text("job_queue_size=0")
    code, said = shell.run("--start")
    assert code == 1
    assert said.startswith("Invalid configuration: job_queue_size=0 (config.properties, line 1)")
    assert not shell.pid_file.exists()


def test_a_log_to_the_standard_output_stays_there_in_the_background(shell):
    (shell.folder / "config.properties").write_text("log_to=stdout")
    with shell.start("--start") as process:
        assert process.wait() == 0
        pid = int(process.stdout.readline().split()[1])
    assert shell.pid_file.read_text() == str(pid)
    assert not (shell.folder / "logs").exists()


def test_ctrl_c_while_it_waits_ends_the_server_too(shell):
    (shell.folder / "config.properties").write_text("log_to=stdout")
    with shell.start("--start", front="slow") as process:
        pid = int(process.stdout.readline().split()[1])
        with OtherProcess(pid) as server:
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
            assert server.has_ended()
    assert not shell.pid_file.exists()


def test_the_flags_reach_the_server(shell, tmp_path):
    for name in ("c.properties", "log.xml"):
        (tmp_path / name).touch()
    (tmp_path / "store").mkdir()
    _, said = shell.run(
        *("--start", "--mms-config", "c.properties", "--model-store", "store"),
        *("--models", "a=a.mar", "b.mar", "--log-config", "log.xml", "--foreground"),
        front="echo",
    )
    assert json.loads(said)["given"] == {
        "mms_config": "c.properties",
        "model_store": "store",
        "models": "a=a.mar,b.mar",
        "log_config": str(tmp_path / "log.xml"),
        "ready_fd": None,
    }


def test_the_launcher_is_never_taken_for_the_server(shell):
    _, said = shell.run("--start", front="echo")
    assert SERVER_WORD not in json.loads(said)["parent"].split("\0")


# In the foreground


def test_in_the_foreground_the_command_becomes_the_server(shell):
    with shell.start("--start", "--foreground") as process:
        assert int(process.stdout.readline().split()[1]) == process.pid
        assert shell.pid_file.read_text() == str(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert not shell.pid_file.exists()


def test_in_the_foreground_the_exit_code_is_the_servers(shell):
    assert shell.run("--foreground", front="fails")[0] == 3
    assert shell.run("--foreground", front="crashes")[0] == -signal.SIGKILL


def test_an_interpreter_that_cannot_be_run_is_said_so_and_leaves_no_pid_file(shell, tmp_path):
    call = "setattr(sys, 'executable', '/no/such/python') or launcher.main()"
    for flags in (("--start",), ("--foreground",)):
        code, said = shell.run(*flags, call=call)
        assert code != 0
        assert "/no/such/python" in said
        assert not shell.pid_file.exists()


# What is checked first


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (["--mms-config", "no.properties"], {}, "--mms-config file not found: no.properties"),
        (["--log-config", "no.xml"], {}, "--log-config file not found: {folder}/no.xml"),
        (["--model-store", "no"], {}, "--model-store directory not found: no"),
        ([], {"TEMP": "/no/such"}, "Invalid temp directory: /no/such"),
        (["--models", "a=a.mar"], {}, "--model-store is required"),
        (["--models", "all"], {}, "--model-store is required"),
        (["--models", "http://h/a.mar", "b.mar"], {}, "--model-store is required"),
    ],
)
@pytest.mark.parametrize("mode", ["--foreground", "--start"])
def test_a_wrong_flag_is_said_and_nothing_is_started(shell, flags, environ, said, mode):
    code, output = shell.run(mode, *flags, **environ)
    assert code == 1
    assert output.startswith(said.format(folder=shell.folder))
    assert not shell.pid_file.exists()


def test_flags_are_checked_in_multi_model_servers_order(shell):
    wrong = ["--log-config", "no", "--mms-config", "no", "--model-store", "no", "--models", "a"]
    left = {"TEMP": "/no/such"}
    assert shell.run(*wrong, **left)[1].startswith("--log-config")
    assert shell.run(*wrong[2:], **left)[1].startswith("Invalid temp directory")
    assert shell.run(*wrong[2:])[1].startswith("--mms-config")
    assert shell.run(*wrong[4:])[1].startswith("--model-store directory")
    assert shell.run(*wrong[6:])[1].startswith("--model-store is required")


@pytest.mark.parametrize(
    "models", [["http://h/a.mar"], ["a=HTTPS://h/a.mar"], ["ALL"], ["m=s3://bucket/a.mar"]]
)
def test_urls_need_no_model_store(shell, models):
    assert shell.run("--foreground", "--models", *models, front="echo")[0] == 7


def test_a_model_store_in_the_file_is_enough(shell):
    (shell.folder / "config.properties").write_text("model_store=.")
    assert shell.run("--foreground", "--models", "a.mar", front="echo")[0] == 7


@pytest.mark.parametrize("flags", [["--start", "--stop"], ["--no-such-flag"], ["--models"]])
def test_wrong_usage_ends_with_2(shell, flags):
    code, said = shell.run(*flags)
    assert code == 2
    assert said.startswith("usage: multi-model-server")


def test_help_is_help(shell):
    code, said = shell.run("--help")
    assert code == 0
    assert said.startswith("usage: multi-model-server [-h] [--start | --stop]")


# Stop


def test_a_stop_asks_the_server_and_waits_for_its_end(shell):
    pid = shell.start_in_background()
    with OtherProcess(pid) as server:
        code, said = shell.run("--stop")
        assert (code, said) == (0, "Model server stopped.\n")
        assert server.has_ended()
    assert not shell.pid_file.exists()


def test_a_stop_without_a_server_fails_and_says_where_it_looked(shell):
    code, said = shell.run("--stop")
    assert code == 1
    assert said.startswith("Model server is not currently running.\n")
    assert str(shell.pid_file) in said


def test_a_stop_in_another_temp_folder_harms_nothing(shell, tmp_path):
    pid = shell.start_in_background()
    (tmp_path / "other").mkdir()
    assert shell.run("--stop", TMPDIR=str(tmp_path / "other"))[0] == 1
    with OtherProcess(pid) as server:
        assert not server.has_ended()


def test_a_server_that_does_not_stop_is_killed(shell):
    (shell.folder / "config.properties").write_text("stop_timeout_seconds=0.1")
    pid = shell.start_in_background(front="stubborn")
    with OtherProcess(pid) as server:
        code, said = shell.run("--stop", call="launcher.stop(os.environ, margin_s=0.1)")
        assert code == 0
        assert said.splitlines() == [
            "Model server did not stop within 0.2 s and is killed.",
            "Model server stopped.",
        ]
        assert server.has_ended()
    assert not shell.pid_file.exists()


def test_a_server_with_settings_that_are_wrong_by_now_is_stopped_too(shell):
    shell.start_in_background()
    (shell.folder / "config.properties").write_text("stop_timeout_seconds=never")
    assert shell.run("--stop") == (0, "Model server stopped.\n")


@pytest.fixture
def bystander():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_pid_that_means_another_process_by_now_is_left_alone(shell, bystander):
    shell.pid_file.write_text(str(bystander.pid))
    assert shell.run("--stop") == (0, "Model server already stopped.\n")
    assert not shell.pid_file.exists()
    assert bystander.poll() is None


@pytest.mark.parametrize("content", ["", "no number", "0"])
def test_a_pid_file_without_a_pid_is_removed(shell, content):
    shell.pid_file.write_text(content)
    assert shell.run("--stop") == (0, "Model server already stopped.\n")
    assert not shell.pid_file.exists()


def test_a_start_removes_an_orphan_pid_file(shell, bystander):
    shell.pid_file.write_text(str(bystander.pid))
    with shell.start("--start", "--foreground") as process:
        assert process.stdout.readline() == "Removing orphan pid file.\n"
        assert int(process.stdout.readline().split()[1]) == process.pid
        assert shell.pid_file.read_text() == str(process.pid)
        process.terminate()
    assert bystander.poll() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_orphan_pid_file_of_another_user_is_said_to_be_in_the_way():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)  # as /tmp
        shell = Shell(Path(folder))
        shell.pid_file.write_text("0")
        # Imported first: the other user may not be able to read the interpreter's files.
        steps = "__import__('mmserve.platform')", "os.seteuid(65534)"
        start = "launcher.start(None, os.environ, foreground=False)"
        code, said = shell.run(call=f"({', '.join((*steps, start))})[-1]")
    assert code == 1
    assert str(shell.pid_file) in said
    assert "TMPDIR" in said
    assert "already running" not in said


def test_a_pid_file_that_is_a_folder_is_said_so(shell):
    shell.pid_file.mkdir()
    for flag in ("--stop", "--start"):
        code, said = shell.run(flag)
        assert code == 1
        assert said.startswith("The pid file cannot be read: ")


# The other names


def test_the_old_name_warns_and_does_the_same(shell):
    code, said = shell.run("--stop", call="launcher.deprecated_main()")
    assert code == 1
    first, second, *_ = said.splitlines()
    assert first.startswith("Warning: ")
    assert "multi-model-server" in first
    assert second == "Model server is not currently running."


def test_export_points_to_the_archiver(shell):
    code, said = shell.run(call="launcher.export_main()")
    assert code == 0
    assert said.startswith("\033[93m")
    assert "model-archiver" in said


def test_windows_is_refused_in_one_line():
    assert launcher.refusal("linux") is launcher.refusal("darwin") is None
    why = launcher.refusal("win32")
    assert why is not None
    assert "\n" not in why
    assert "WSL" in why
    assert "docker" in why


def test_a_path_in_no_encoding_is_printed_all_the_same(shell):
    code, said = shell.run("--start", "--model-store", os.fsdecode(b"/no/\xff"))
    assert code == 1
    assert "directory not found: /no/" in said


def test_the_launcher_imports_nothing_heavy():
    code = "import sys, mmserve.cli.launcher; print(*sys.modules)"
    search = {"PYTHONPATH": str(Path(launcher.__file__).parents[2])}
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code], env=search, capture_output=True, text=True, check=True
    )
    heavy = {"asyncio", "ctypes", "msgspec", "pathlib", "socket", "subprocess", "typing"}
    assert not heavy & set(loaded.stdout.split())
