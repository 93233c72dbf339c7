"""`multi-model-server`: starts the front, or stops it, in Multi Model Server's words.

Where it differs: exit codes are honest, `--foreground` becomes the server itself, and a start in
the background returns when the server answers. Imports little, for a quick start.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

from mmserve.config import launch
from mmserve.config.launch import Arguments

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mmserve.platform import OtherProcess

# pathlib alone would take as long to import as all the rest of this.
# ruff: noqa: PTH100, PTH103, PTH110, PTH112, PTH113, PTH118

#: What a server gets on top of its own `stop_timeout_seconds` before it is killed.
STOP_MARGIN_S = 10.0

#: File in `log_location` for what a server in the background writes to its own standard output
#: and error: traces of a crash, mostly.
CONSOLE = "console.log"

#: How much of it is shown when the server could not start, in bytes.
_TAIL_BYTES = 16_384

_URL = re.compile(r"(?:[^=]*=)?[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def main() -> int:
    """`multi-model-server`"""
    return guarded(lambda: _run(sys.argv[1:]))


def deprecated_main() -> int:
    """`mxnet-model-server`"""
    print("Warning: mxnet-model-server is deprecated, please call multi-model-server.", flush=True)
    return main()


def export_main() -> int:
    """`multi-model-export`"""
    print("\033[93mmulti-model-export is gone; model-archiver makes model archives.\033[0m")
    return 0


def refusal(platform: str) -> str | None:
    """Why there is no server on this platform, a value of `sys.platform`; None: there is one."""
    if platform != "win32":
        return None
    return "mmserve needs Linux or macOS; on Windows run it under WSL (wsl --install) or in docker."


def guarded(command: Callable[[], int]) -> int:
    """Runs a command as its process's main. Ctrl-C and a closed pipe end it without a trace."""
    if (why := refusal(sys.platform)) is not None:
        print(why)
        return 1
    for stream in (sys.stdout, sys.stderr):  # a path need not be valid in any encoding
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # What reads our output has gone; what is left in the buffer must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(argv: Sequence[str]) -> int:
    flags = _parser().parse_args(argv)
    if flags.stop:
        return stop(os.environ)
    return start(flags, os.environ, foreground=flags.foreground)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multi-model-server",
        description="Serves many models over HTTP.",
        epilog="Without --foreground the command returns 0 once the server answers, or the "
        "server's exit code when it could not start. `mmserve --help` shows more.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--start", action="store_true", help="start the server (the default)")
    action.add_argument("--stop", action="store_true", help="stop the server, requests in work end")
    add_server_flags(parser)
    parser.add_argument(
        "--foreground", action="store_true", help="be the server, in place of starting one"
    )
    return parser


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that `start` reads."""
    parser.add_argument(
        "--mms-config",
        metavar="FILE",
        help="configuration file; the word sagemaker stands for a built-in one",
    )
    parser.add_argument(
        "--model-store", metavar="DIR", help="directory of local models, overrides model_store"
    )
    parser.add_argument(
        "--models",
        metavar="[NAME=]LOCATION",
        nargs="+",
        help="models to load at start, or ALL of the model store; overrides load_models",
    )
    parser.add_argument("--log-config", metavar="FILE", help="accepted, and not read: log4j's")


# Start


def start(flags: argparse.Namespace, environ: Mapping[str, str], *, foreground: bool) -> int:
    """Checks the flags in Multi Model Server's order, then starts the front.

    Returns:
        The exit code: 0 once the server answers, else its own. With `foreground` it does not
        return but becomes the server.
    """
    try:
        pid_file = launch.pid_file(environ)
        pid = launch.read_pid(pid_file)
    except OSError as error:
        return _refuse(f"The pid file cannot be read: {error}")
    if pid is not None:
        if (server := _server(pid)) is not None:
            server.close()
            return _refuse_second()
        print("Removing orphan pid file.")
        launch.remove_pid(pid_file, pid)
        if launch.read_pid(pid_file) == pid:
            return _refuse(
                f"{pid_file} is another user's and cannot be removed; "
                "TMPDIR can name a directory of your own."
            )
    if (why := problem(flags, environ)) is not None:
        return _refuse(why)
    arguments = arguments_of(flags)
    sys.stdout.flush()
    try:
        if foreground:
            return _become_front(arguments, pid_file)
        return _start_front(arguments, pid_file, environ)
    except FileExistsError:
        return _refuse_second()
    except OSError as error:
        return _refuse(f"The server cannot be started: {error}")


def problem(flags: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """Why a start with these flags is refused, before the settings are read."""
    if flags.log_config is not None:
        path = os.path.abspath(flags.log_config)
        if not os.path.isfile(path):
            return f"--log-config file not found: {path}"
    temp = environ.get("TEMP")
    if temp and not os.path.isdir(temp):
        return f"Invalid temp directory: {temp}, the environment variable TEMP names it."
    config = flags.mms_config
    if config is not None and config != "sagemaker" and not os.path.exists(config):
        return f"--mms-config file not found: {config}"
    if flags.model_store is not None and not os.path.isdir(flags.model_store):
        return f"--model-store directory not found: {flags.model_store}"
    if flags.models and flags.model_store is None:
        local = [each for each in flags.models if each != "ALL" and not _URL.match(each)]
        if local and not _has_store(arguments_of(flags), environ):
            return f"--model-store is required to load {local[0]}, which is no URL."
    return None


def _has_store(arguments: Arguments, environ: Mapping[str, str]) -> bool:
    """Whether the configuration names a model store. The server itself reports a wrong one."""
    from mmserve.config.load import load_settings  # as slow as all the rest; seldom needed
    from mmserve.errors import ConfigurationError

    try:
        loaded = load_settings(arguments, environ, with_gpus=False)
    except ConfigurationError:
        return True
    return loaded.settings.model_store is not None


def arguments_of(flags: argparse.Namespace) -> Arguments:
    """What the front is to be told."""
    return Arguments(
        mms_config=flags.mms_config,
        model_store=flags.model_store,
        models=",".join(flags.models) if flags.models else None,
        log_config=os.path.abspath(flags.log_config) if flags.log_config is not None else None,
    )


def _become_front(arguments: Arguments, pid_file: str) -> int:
    """Same pid: signals reach the server itself, and its exit code is ours."""
    words = launch.front_command(arguments)
    launch.write_pid(pid_file, os.getpid())
    try:
        os.execv(words[0], words)
    except OSError as error:
        launch.remove_pid(pid_file, os.getpid())
        return _refuse(f"{words[0]} cannot be run: {error.strerror}")


def _start_front(arguments: Arguments, pid_file: str, environ: Mapping[str, str]) -> int:
    """Starts the front in a session of its own and waits until it is ready, or gone."""
    from mmserve.config.load import load_settings
    from mmserve.errors import ConfigurationError

    try:
        loaded = load_settings(arguments, environ, with_gpus=False)
    except ConfigurationError as error:
        return _refuse(f"Invalid configuration: {error}")
    settings, can_write = loaded.settings, loaded.can_write_logs
    if settings.log_to != "files" and can_write:  # who wants the log on our output gets it there
        return _wait_for_front(arguments, pid_file, None)
    with _Console(settings.log_location) as console:
        code = _wait_for_front(arguments, pid_file, console)
        if code == 0:
            if not can_write:
                print(
                    f"Nothing is logged: {settings.log_location} cannot be written; log_location "
                    "names another folder, log_to=stdout logs to the standard output.",
                    file=sys.stderr,
                )
            print("Model server started.", flush=True)
        else:
            console.show()
    return code


def _wait_for_front(arguments: Arguments, pid_file: str, console: _Console | None) -> int:
    ready_fd, arguments.ready_fd = os.pipe()
    words = launch.front_command(arguments)
    pid = os.fork()
    if pid == 0:
        _exec_detached(words, arguments.ready_fd, console)
    os.close(arguments.ready_fd)
    try:
        launch.write_pid(pid_file, pid)
        said = b""
        while launch.READY not in said:
            if not (part := os.read(ready_fd, 64)):
                return _exit_code(pid)
            said += part
        pid = 0  # it is on its own now
        return 0
    finally:
        os.close(ready_fd)
        if pid:
            _end_child(pid)
            launch.remove_pid(pid_file, pid)


def _exec_detached(words: list[str], ready_fd: int, console: _Console | None) -> None:
    """In the child of a fork: never returns."""
    complaints = os.dup(2)
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if console is not None:
            for fd in (1, 2):
                os.dup2(console.fd, fd)
        os.set_inheritable(ready_fd, True)
        os.execv(words[0], words)
    except OSError as error:
        said = f"{words[0]} cannot be run: {error.strerror}\n"
        os.write(complaints, said.encode(errors="backslashreplace"))
    finally:
        os._exit(127)


class _Console:
    """Where a server in the background writes what would go to a terminal.

    Attributes:
        fd: open for appending.
        path: None where the log folder cannot be written, and everything is thrown away.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.path: str | None = os.path.join(folder, CONSOLE)
        try:
            os.makedirs(folder, exist_ok=True)
            self.fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except (OSError, ValueError):
            self.path, self.fd = None, os.open(os.devnull, os.O_RDWR)
        self._start = os.lseek(self.fd, 0, os.SEEK_END)

    def __enter__(self) -> _Console:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def show(self) -> None:
        """Prints the end of what was written since it was opened."""
        if self.path is None:
            print(f"What it said is lost: {self.folder} cannot be written; --foreground shows it.")
            return
        end = os.fstat(self.fd).st_size
        start = max(self._start, end - _TAIL_BYTES)
        tail = os.pread(self.fd, end - start, start).decode(errors="backslashreplace")
        if start > self._start:
            tail = f"… the end of {self.path}:\n{tail.partition(chr(10))[2] or tail}"
        sys.stdout.write(tail if tail.endswith("\n") or not tail else tail + "\n")


def _exit_code(pid: int) -> int:
    """What became of a front that is not ready and says no more."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        print(f"The server was ended by signal {-code} before it was ready.")
        return 128 - code
    return code or 1


def _end_child(pid: int) -> None:
    """Ends a front that nobody waits for any more, if it has not ended."""
    import signal

    try:
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
    except ChildProcessError:
        pass


# Stop


def stop(environ: Mapping[str, str], margin_s: float = STOP_MARGIN_S) -> int:
    """Ends the server that the pid file names: running requests first, then force.

    Args:
        environ: decides where the pid file is.
        margin_s: what the server gets on top of its own `stop_timeout_seconds`.

    Returns:
        The exit code: 0 when no server is left, 1 when none was found or it may not be stopped.
    """
    try:
        pid_file = launch.pid_file(environ)
        pid = launch.read_pid(pid_file)
    except OSError as error:
        return _refuse(f"The pid file cannot be read: {error}")
    if pid is None:
        print("Model server is not currently running.")
        print(f"There is no {pid_file}; TMPDIR, TEMP or TMP of the start decide where it is.")
        return 1
    server = _server(pid)
    if server is None:
        launch.remove_pid(pid_file, pid)
        print("Model server already stopped.")
        return 0
    with server:
        try:
            _end(server, margin_s)
        except PermissionError:
            return _refuse(f"Process {pid} is the server of another user; it was not stopped.")
    launch.remove_pid(pid_file, pid)
    print("Model server stopped.")
    return 0


def _end(server: OtherProcess, margin_s: float) -> None:
    import contextlib
    import signal

    limit_s = _stop_timeout_s(server) + margin_s
    with contextlib.suppress(ProcessLookupError):
        server.signal(signal.SIGTERM)
        if not server.wait(limit_s):
            print(f"Model server did not stop within {limit_s:g} s and is killed.", flush=True)
            server.signal(signal.SIGKILL)
            server.wait(STOP_MARGIN_S)  # the kernel is taking it apart


def _server(pid: int) -> OtherProcess | None:
    """The process, if it is a server of ours: a pid may have come to mean another."""
    from mmserve.platform import OtherProcess

    if pid <= 0:
        return None
    try:
        process = OtherProcess(pid)
    except ProcessLookupError:
        return None
    if launch.SERVER_WORD in process.command_line():
        return process
    process.close()
    return None


def _stop_timeout_s(server: OtherProcess) -> float:
    """`stop_timeout_seconds` of a running server, read as it read its own settings."""
    from mmserve.config.load import load_settings
    from mmserve.config.settings import Settings
    from mmserve.errors import ConfigurationError

    words = server.command_line()
    try:
        arguments = launch.parse_arguments(words[words.index(launch.SERVER_WORD) :])
        loaded = load_settings(arguments, server.environ(), server.cwd(), with_gpus=False)
    except (ConfigurationError, ValueError):
        return Settings().stop_timeout_seconds
    return loaded.settings.stop_timeout_seconds


def _refuse_second() -> int:
    return _refuse("Model server is already running; multi-model-server --stop ends it.")


def _refuse(message: str) -> int:
    print(message)
    return 1


if __name__ == "__main__":
    sys.exit(main())
