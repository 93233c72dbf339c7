"""The servers under test: started from a command, in private folders, stopped with their kin."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from mmserve_loadtest import processes
from mmserve_loadtest.client import BadReply, NoReply, Reply, call

START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
REST_LIMIT_S = 1.0
KILL_LIMIT_S = 10.0
POLL_S = 0.05
#: Multi Model Server refuses ports from 32767 on.
FIRST_PORT, LAST_PORT = 20_000, 32_000
#: Settings of the caller's environment that must not reach a server under test.
HIDDEN_PREFIXES = (
    *("MMS_", "SAGEMAKER_", "MODEL_SERVER_HOME", "LOG_LOCATION", "METRICS_LOCATION"),
    *("TS_", "TRITON"),
)
HIDDEN_NAMES = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", processes.MARK)
ORACLE = Path(".oracle/bin/multi-model-server")


class ServerFailed(Exception):
    """A server did not come up, or cannot be started at all; the message says why."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A server that can be started.

    Attributes:
        name: in tables and results.
        command: words before the flags.
        version: of the server.
        env: variables it gets besides those of the caller.
    """

    name: str
    command: tuple[str, ...]
    version: str
    env: Mapping[str, str] = {}


def mmserve(command: str | None = None) -> Subject:
    """Our server; by default the command installed beside this interpreter.

    Raises:
        ServerFailed: there is no such command.
    """
    words = _words(command) if command else (str(_beside_python("multi-model-server")),)
    return Subject(name="mmserve", command=words, version=installed_version(words, "mmserve"))


def mms(command: str | None = None) -> Subject:
    """Multi Model Server: `command`, else `$MMS_ORACLE`, else `.oracle/bin/multi-model-server`.

    Raises:
        ServerFailed: it or Java is missing; the message says how to get it.
    """
    words = _words(command or os.environ.get("MMS_ORACLE") or str(ORACLE))
    if shutil.which(words[0]) is None:
        raise ServerFailed(
            f"Multi Model Server is not at {words[0]}. Install it with `make oracle`, or name it "
            "with --mms or the variable MMS_ORACLE."
        )
    if not has_java():
        raise ServerFailed("Multi Model Server needs Java; there is none on PATH or in JAVA_HOME.")
    # The launcher hands its own interpreter on to its workers: it must find it before ours.
    own = str(Path(shutil.which(words[0]) or words[0]).absolute().parent)
    return Subject(
        name="MMS",
        command=words,
        version=installed_version(words, "multi_model_server"),
        env={"PATH": f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}"},
    )


def has_java() -> bool:
    home = os.environ.get("JAVA_HOME")
    return shutil.which(f"{home}/bin/java" if home else "java") is not None


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on and that every server accepts."""
    ports: list[int] = []
    start = FIRST_PORT + (os.getpid() * 97 + time.monotonic_ns() // 1000) % 10_000
    with contextlib.ExitStack() as held:
        for port in range(start, LAST_PORT):
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
                if len(ports) == count:
                    return ports
    raise ServerFailed("no free port")


class Started:
    """A server that was started here, whatever it speaks, and all the processes it left.

    Attributes:
        name, version: in tables and results.
        home: its private directory, with `logs`, `tmp` and `output.txt`.

    Args:
        command: all of it.
        env: variables it gets besides those of the caller.
    """

    def __init__(
        self,
        name: str,
        version: str,
        home: Path,
        command: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        self.name, self.version, self.home = name, version, home
        self._tmp, self._logs = home / "tmp", home / "logs"
        for folder in (self._tmp, self._logs):
            folder.mkdir(parents=True)
        self._run, self._output = uuid.uuid4().hex, home / "output.txt"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=home,
                env=self._environment() | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        own = {name: str(self._tmp) for name in ("TMPDIR", "TEMP", "TMP")}
        own |= {"LOG_LOCATION": str(self._logs), "METRICS_LOCATION": str(self._logs)}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(HIDDEN_PREFIXES) and name not in HIDDEN_NAMES
        }
        return inherited | own | {processes.MARK: self._run}

    def answers(self) -> bool:
        """Whether it is ready to be measured."""
        raise NotImplementedError

    def wait_until_ready(self, limit_s: float) -> None:
        """Raises ServerFailed with the end of its output."""
        until = time.monotonic() + limit_s
        while not self.answers():
            if self._process.poll() is not None and not self.pids():
                raise ServerFailed(f"{self.name} ended at start:\n{self.output()[-3000:]}")
            if time.monotonic() > until:
                raise ServerFailed(
                    f"{self.name} did not answer within {limit_s:g} s:\n{self.output()[-3000:]}"
                )
            time.sleep(POLL_S)

    def pids(self) -> set[int]:
        """Living processes of this server."""
        return processes.of_run(self._run, self._process.pid)

    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def stop(self) -> None:
        """SIGTERM and ten seconds, one more for the rest, then SIGKILL for all that is left.

        Raises:
            ServerFailed: processes are left all the same.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_LIMIT_S)
        until = time.monotonic() + REST_LIMIT_S
        while self.pids() and time.monotonic() < until:
            time.sleep(POLL_S)
        until = time.monotonic() + KILL_LIMIT_S
        while left := self.pids():
            if time.monotonic() > until:
                raise ServerFailed(f"{self.name} left processes: {sorted(left)}")
            processes.kill(left)
            time.sleep(POLL_S)
        self._process.wait()


class Server(Started):
    """A running server with the command line and the APIs of Multi Model Server.

    Attributes:
        inference, management: `http://127.0.0.1:PORT`.
    """

    def __init__(
        self,
        subject: Subject,
        home: Path,
        store: Path,
        properties: Mapping[str, object],
        env: Mapping[str, str],
        models: tuple[str, ...],
        one_port: bool,
    ) -> None:
        self.subject = subject
        inference, management = free_ports(2)
        if one_port:
            management = inference
        self.inference = f"http://127.0.0.1:{inference}"
        self.management = f"http://127.0.0.1:{management}"
        addresses = {"inference_address": self.inference, "management_address": self.management}
        lines = (f"{key}={value}\n" for key, value in (addresses | dict(properties)).items())
        config = home / "bench.properties"
        config.write_text("".join(lines), encoding="utf-8")
        flags = ["--start", "--foreground", "--mms-config", str(config), "--model-store"]
        flags += [str(store), *(("--models", *models) if models else ())]
        super().__init__(
            subject.name,
            subject.version,
            home,
            (*subject.command, *flags),
            dict(subject.env) | dict(env),
        )

    def answers(self) -> bool:
        with contextlib.suppress(OSError, NoReply):
            call("GET", f"{self.inference}/ping", timeout_s=5)
            call("GET", f"{self.management}/models", timeout_s=5)
            return True
        return False

    def manage(self, method: str, path: str, *, timeout_s: float = 300.0) -> Reply:
        """A management call that must succeed. Raises ServerFailed when it does not."""
        try:
            reply = call(method, self.management + path, timeout_s=timeout_s)
        except (OSError, NoReply, BadReply) as failed:
            answer = str(failed)
        else:
            if reply.status < 300:
                return reply
            answer = f"{reply.status} {reply.body.decode(errors='replace')}"
        raise ServerFailed(
            f"{self.subject.name}: {method} {path}: {answer}\n{self.output()[-3000:]}"
        )


@contextlib.contextmanager
def running(
    subject: Subject,
    store: Path,
    *,
    properties: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    models: tuple[str, ...] = (),
    one_port: bool = False,
    limit_s: float = START_LIMIT_S,
) -> Iterator[Server]:
    """A server that answers, as shipped but for its addresses and folders; stopped at the end.

    Args:
        properties: more lines of its `config.properties`.
        models: words of `--models`.
        one_port: one listener has both APIs.

    Raises:
        ServerFailed: it does not come up.
    """
    # Short, because sockets in it may be named at most 107 bytes long.
    home = Path(tempfile.mkdtemp(prefix="mmsb-", dir="/tmp" if Path("/tmp").is_dir() else None))
    try:
        server = Server(subject, home, store, properties or {}, env or {}, models, one_port)
        try:
            server.wait_until_ready(limit_s)
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _words(command: str) -> tuple[str, ...]:
    first, *rest = shlex.split(command)
    # The server runs in another directory.
    return (str(Path(first).absolute()) if os.sep in first else first, *rest)


def _beside_python(name: str) -> Path:
    beside = Path(sys.executable).parent / name
    if beside.exists():
        return beside
    if found := shutil.which(name):
        return Path(found)
    raise ServerFailed(f"there is no {name} beside {sys.executable}; install mmserve first")


def installed_version(words: tuple[str, ...], distribution: str) -> str:
    """The version in the metadata of the environment that a command belongs to."""
    command = Path(shutil.which(words[0]) or words[0])
    pattern = f"lib/python3*/site-packages/{distribution}-*.dist-info"
    found = sorted(command.parent.parent.glob(pattern))
    return found[-1].name.removesuffix(".dist-info").partition("-")[2] if found else "unknown"
