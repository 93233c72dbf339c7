"""What the launcher and the front agree on: a command line, a pid file, a word when it is ready.

Imports as little as possible: the launcher is in a hurry.
"""

# pathlib alone would take as long to import as all the rest of the launcher.
# ruff: noqa: PTH100, PTH108, PTH109, PTH112, PTH118

from __future__ import annotations

import os
import site
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: The argument by which the SageMaker toolkit finds the one server process.
SERVER_WORD = "com.amazonaws.ml.mms.ModelServer"

#: What the front writes to `--ready-fd` once both ports are bound.
READY = b"ready\n"

_FLAGS = {
    "--mms-config": "mms_config",
    "--model-store": "model_store",
    "--models": "models",
    "--log-config": "log_config",
    "--ready-fd": "ready_fd",
}


class Arguments:
    """Flags of the front; None for one that was not given.

    Attributes:
        mms_config: configuration file, or the word "sagemaker".
        model_store, models: override `model_store` and `load_models`.
        log_config: log4j file, which nothing here reads.
        ready_fd: descriptor that waits for `READY`.
    """

    __slots__ = ("log_config", "mms_config", "model_store", "models", "ready_fd")

    def __init__(
        self,
        *,
        mms_config: str | None = None,
        model_store: str | None = None,
        models: str | None = None,
        log_config: str | None = None,
        ready_fd: int | None = None,
    ) -> None:
        self.mms_config, self.model_store, self.models = mms_config, model_store, models
        self.log_config, self.ready_fd = log_config, ready_fd

    def words(self) -> list[str]:
        """The command line that `parse_arguments` reads."""
        return [
            word
            for flag, name in _FLAGS.items()
            if (value := getattr(self, name)) is not None
            for word in (flag, str(value))
        ]


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Reads the front's own command line, `sys.argv[1:]`. Raises ConfigurationError."""
    from mmserve.errors import ConfigurationError

    given: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        if word == SERVER_WORD:
            continue
        if word not in _FLAGS:
            raise ConfigurationError(f"{word} is no flag of the server; it has {', '.join(_FLAGS)}")
        if (value := next(words, None)) is None:
            raise ConfigurationError(f"{word} needs a value")
        given[_FLAGS[word]] = value
    fd = given.pop("ready_fd", None)
    if fd is not None and not fd.isdecimal():
        raise ConfigurationError(f"--ready-fd {fd} is no file descriptor")
    return Arguments(**given, ready_fd=None if fd is None else int(fd))


def isolated_python() -> list[str]:
    """The words that start an interpreter like this one which finds mmserve.

    `-I` keeps the current directory, `PYTHONPATH` and the user's own packages out of a server
    process. Where mmserve itself is one of the user's own packages, these stay.
    """
    here = os.path.realpath(__file__)
    own = os.path.realpath(site.getusersitepackages())
    is_own = bool(site.ENABLE_USER_SITE) and here.startswith(own + os.sep)
    return [sys.executable, *(["-E", "-P"] if is_own else ["-I"])]


def front_command(arguments: Arguments) -> list[str]:
    """The command line of the front."""
    return [*isolated_python(), "-m", "mmserve.serve", SERVER_WORD, *arguments.words()]


def announce_ready(ready_fd: int | None) -> None:
    """Tells a launcher that waits that both ports are bound. The descriptor is closed."""
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, READY)
        os.close(ready_fd)
    except OSError:  # the launcher was interrupted; the server runs on
        pass


def temp_dir(environ: Mapping[str, str]) -> str:
    """The temporary directory, by the same rules as Python's `tempfile`, which is slow to import.

    Raises:
        FileNotFoundError: no candidate is a directory that can be written.
    """
    named = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    for folder in [*named, "/tmp", "/var/tmp", "/usr/tmp", os.getcwd()]:
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return os.path.abspath(folder)
    raise FileNotFoundError("no directory for temporary files; TMPDIR names one")


def pid_file(environ: Mapping[str, str]) -> str:
    """Path of the pid file: one server per temporary directory, as Multi Model Server has it."""
    return os.path.join(temp_dir(environ), ".model_server.pid")


def read_pid(path: str) -> int | None:
    """The pid in a pid file; 0 where there is none in it; None without a file."""
    try:
        with open(path, "rb") as file:
            text = file.read(32).strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() and len(text) < 11 else 0


def write_pid(path: str, pid: int) -> None:
    """Makes the pid file: the number, without a newline. Raises FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, str(pid).encode())
    finally:
        os.close(fd)


def remove_pid(path: str, pid: int) -> None:
    """Removes the pid file, unless it names another process by now."""
    try:
        if read_pid(path) == pid:
            os.unlink(path)
    except OSError:  # somebody else's, or a file system that is read-only by now
        pass


def remove_own_pid_file(environ: Mapping[str, str]) -> None:
    """What the front does at its end."""
    try:
        path = pid_file(environ)
    except FileNotFoundError:
        return
    remove_pid(path, os.getpid())
