"""A real server in folders of its own, talked to over HTTP and looked at through /proc."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

T = TypeVar("T")

#: Every process of a server has it in its environment, so that orphans are found too.
MARK = "MMSERVE_TEST_RUN"
COMMAND = Path(sys.executable).with_name("multi-model-server")
LIMIT_S = 30.0
#: What would reach a server under test from the shell that runs the tests.
_HIDDEN = ("MMS_", "SAGEMAKER_", "MODEL_SERVER_HOME", "LOG_LOCATION", "METRICS_LOCATION", MARK)


def eventually(question: Callable[[], T], *, what: str, limit_s: float = LIMIT_S) -> T:
    """Asks until the answer is true; for what sends no event that could be waited for.

    Raises:
        AssertionError: `limit_s` has passed.
    """
    end = time.monotonic() + limit_s
    while not (answer := question()):
        assert time.monotonic() < end, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)
    return answer


# Models


def handler(predict: str = "return ['ok']", *, load: str = "pass", setup: str = "") -> str:
    """Source of a function handler.

    Args:
        predict: statements of one prediction; they see `data`, `context` and `b`, the first body.
        load: statements of the first call.
        setup: statements at module level.
    """

    def block(text: str) -> str:
        return textwrap.indent(textwrap.dedent(text).strip(), " " * 8)

    return (
        "import os, signal, subprocess, sys, threading, time\n"
        f"{textwrap.dedent(setup).strip()}\n"
        "def handle(data, context):\n"
        f"    if data is None:\n{block(load)}\n        return None\n"
        "    else:\n        b = data[0].get('body')\n"
        f"{block(predict)}\n"
    )


PID = handler("return [str(os.getpid())]")
#: Sleeps as long as the body says, then answers with its pid.
SLEEPY = handler("time.sleep(float(bytes(b) or b'0')); return [str(os.getpid())]")
ECHO = handler("return [bytes(b)]")


def write_mar(path: Path, source: str, files: Mapping[str, str | bytes] | None = None) -> Path:
    """An archive with `service.py`, a manifest that names it, and more files."""
    manifest = {"runtime": "python", "model": {"modelName": path.stem, "handler": "service:handle"}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("service.py", source)
        for name, content in (files or {}).items():
            archive.writestr(name, content)
    return path


# Processes


def marked(run: str) -> dict[int, str]:
    """Living processes of a run: pid → command line."""
    wanted = f"{MARK}={run}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = words.decode(errors="replace").strip()
    return found


def is_alive(pid: int) -> bool:
    """False for a process that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def zombies(parent: int) -> list[int]:
    """Dead children that `parent` has not reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] == "Z" and int(fields[1]) == parent:
                    found.append(int(entry.name))
    return found


# The server


class Reply(NamedTuple):
    status: int
    reason: str
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """Of an error; fails where the reply is none, or not of the shape that errors have."""
        error = self.json()
        assert self.status >= 400 and error["code"] == self.status, self
        return str(error["message"])


class Server:
    """A server process, just started.

    Args:
        home: where its configuration, store, logs and temporary files go.
        properties: lines of config.properties, `{"job_queue_size": 2}`.
        archives: in the store before it starts: name → source of `service.py`.
        models: arguments of `--models`.
        env: variables to set or, with None, to drop.
        prefix: words before the command: `unshare`, `prlimit` and their like.
    """

    def __init__(
        self,
        home: Path,
        properties: Mapping[str, object] | None = None,
        *,
        archives: Mapping[str, str] | None = None,
        models: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.home, self.store, self.tmp = home, home / "store", home / "tmp"
        self.logs = home / "logs"
        for folder in (self.store, self.tmp, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        for name, source in (archives or {}).items():
            self.add(name, source)
        settings: dict[str, object] = {
            "inference_address": "http://127.0.0.1:0",
            "management_address": "http://127.0.0.1:0",
            "model_store": self.store,
            "preload_imports": "none",
            "default_response_timeout_seconds": 20,
            **(properties or {}),
        }
        config = home / "config.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        self.run = uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_HIDDEN)}
        own: dict[str, str | None] = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(self.tmp))
        own |= {"LOG_LOCATION": str(self.logs), "METRICS_LOCATION": str(self.logs)}
        own |= {MARK: self.run, **(env or {})}
        words = [*prefix, str(COMMAND), "--start", "--foreground", "--mms-config", str(config)]
        self.process = subprocess.Popen(
            [*words, *(["--models", *models] if models else [])],
            cwd=home,
            env={key: value for key, value in {**kept, **own}.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._has_ended = False
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    # What it says

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                with self._said:
                    self._lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._said.notify_all()
        with self._said:
            self._has_ended = True
            self._said.notify_all()

    def saw(self, text: str, *, limit_s: float = LIMIT_S) -> str:
        """Waits for a line of output with this text; the line."""
        at = 0
        end = time.monotonic() + limit_s
        with self._said:
            while True:
                for line in self._lines[at:]:
                    if text in line:
                        return line
                at = len(self._lines)
                left = end - time.monotonic()
                assert left > 0 and not self._has_ended, f"no {text!r} in:\n{self.output()}"
                self._said.wait(left)

    def output(self) -> str:
        with self._said:
            return "\n".join(self._lines)

    def port(self, key: str = "inference_address") -> int:
        """Where it listens; equal to that of the other key where one listener has both."""
        with self._said:
            found = {
                word.partition("=")[2]: int(line.rpartition("port=")[2])
                for line in self._lines
                if "listening" in line and "port=" in line
                for word in line.split()
                if word.startswith("key=")
            }
        return found.get(key) or next(iter(found.values()))

    @property
    def pid(self) -> int:
        """Of the front."""
        return self.process.pid

    # HTTP

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        management: bool = False,
        limit_s: float = LIMIT_S,
    ) -> Reply:
        """One request on a connection of its own."""
        key = "management_address" if management else "inference_address"
        connection = http.client.HTTPConnection("127.0.0.1", self.port(key), timeout=limit_s)
        try:
            data = body.encode() if isinstance(body, str) else body
            connection.request(method, path, data, dict(headers or {}))
            reply = connection.getresponse()
            names = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, reply.reason, names, reply.read())
        finally:
            connection.close()

    def predict(
        self, model: str, body: bytes | str = b"", content_type: str = "", **options: Any
    ) -> Reply:
        headers = {"Content-Type": content_type} if content_type else {}
        return self.ask("POST", f"/predictions/{quote(model, '')}", body, headers, **options)

    def manage(self, method: str, path: str, **parameters: object) -> Reply:
        """A management request with query parameters."""
        texts = {k: str(v).lower() if isinstance(v, bool) else v for k, v in parameters.items()}
        query = f"?{urlencode(texts)}" if texts else ""
        return self.ask(method, path + query, management=True)

    def register(self, url: str | Path, **parameters: object) -> Reply:
        return self.manage("POST", "/models", url=url, **parameters)

    def load(self, url: str | Path, **parameters: object) -> None:
        """Registers with one worker and waits for it. Must succeed."""
        reply = self.register(url, **{"initial_workers": 1, "synchronous": True} | parameters)
        assert reply.status == 200, reply

    def unregister(self, model: str) -> Reply:
        return self.manage("DELETE", f"/models/{quote(model, '')}")

    def scale(self, model: str, **parameters: object) -> Reply:
        return self.manage("PUT", f"/models/{quote(model, '')}", **parameters)

    def describe(self, model: str) -> dict[str, Any]:
        reply = self.manage("GET", f"/models/{quote(model, '')}")
        assert reply.status == 200, reply
        described: dict[str, Any] = reply.json()
        return described

    def names(self) -> list[str]:
        return [model["modelName"] for model in self.manage("GET", "/models").json()["models"]]

    def workers(self, model: str) -> list[int]:
        """Pids of the workers that are ready."""
        return [w["pid"] for w in self.describe(model)["workers"] if w["status"] == "READY"]

    def connect(self) -> socket.socket:
        """A raw connection to the inference API."""
        return socket.create_connection(("127.0.0.1", self.port()), timeout=LIMIT_S)

    # Models

    def add(
        self, name: str, source: str = PID, files: Mapping[str, str | bytes] | None = None
    ) -> str:
        """Puts an archive into the store; its file name."""
        return write_mar(self.store / f"{name}.mar", source, files).name

    # Processes

    def processes(self) -> dict[int, str]:
        """Its living processes, orphans included: pid → command line."""
        return marked(self.run)

    def zygote(self) -> int:
        """The process that starts the workers: the front's child that runs that program."""
        (pid,) = [
            pid
            for pid, words in self.processes().items()
            if "mmserve.zygote" in words and _parent(pid) == self.pid
        ]
        return pid

    def open_files(self) -> int:
        """Descriptors of the front."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def exit_code(self, *, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.output()}") from None

    def leaves_nothing(self, *, limit_s: float = 10.0) -> None:
        """Waits until no process of it is left."""
        eventually(lambda: not self.processes(), what="no process is left", limit_s=limit_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(10)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@contextlib.contextmanager
def together(most: int = 32) -> Iterator[Callable[..., Future[Any]]]:
    """`with together() as run: reply = run(server.predict, "m")`; all are awaited at the end."""
    with ThreadPoolExecutor(most) as pool:
        yield pool.submit
