"""Real worker processes, talked to over a real socket pair."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmserve.wire.framing import Decoder, cut, encode
from mmserve.wire.messages import (
    Hello,
    Item,
    Load,
    Loaded,
    LoadFailed,
    Outcome,
    Parameter,
    Predict,
    Replies,
    ToFront,
)

LIMIT_S = 60.0
FRESH = ["-m", "mmserve.runtime", "--fd"]

# A fork of a process that has imported the runtime, as the zygote makes them.
FORK = """
import os, sys
from mmserve.runtime.worker import run_worker
pid = os.fork()
if pid == 0:
    run_worker(int(sys.argv[1]), start="fork")
os.close(int(sys.argv[1]))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

# Loads on the first descriptor, then forks a worker for each of the others.
TEMPLATE = """
import os, socket, sys
from mmserve.runtime.worker import introduce, run_loaded
from mmserve.wire.channel import Channel
first, *others = map(int, sys.argv[1].split(","))
channel = Channel(socket.socket(fileno=first))
model = introduce(channel, start="template")
if model is None:
    sys.exit(1)
for fd in others:
    if os.fork() == 0:
        channel.socket.close()
        run_loaded(fd, model)
for fd in others:
    os.close(fd)
for _ in others:
    os.wait()
"""


class Request(NamedTuple):
    """One request of a batch; by default a body and nothing else."""

    body: bytes = b""
    content_type: str = ""
    headers: Sequence[tuple[str, str]] = ()
    parameters: Sequence[tuple[str, bytes, str | None]] | None = None
    id: str = "the-id"

    def item(self) -> tuple[Item, list[bytes]]:
        given = self.parameters
        if given is None:
            given = [("body", self.body, self.content_type)]
        parameters = [Parameter(name, len(value), kind) for name, value, kind in given]
        return Item(self.id, list(self.headers), parameters), [value for _, value, _ in given]


class Answer(NamedTuple):
    outcome: Outcome
    body: bytes

    @property
    def text(self) -> str:
        """Of a success."""
        assert self.outcome.error is None, self.outcome
        return self.body.decode()

    @property
    def error(self) -> tuple[int, str | None]:
        assert self.body == b""
        return self.outcome.status, self.outcome.error


class Wire:
    """The front's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(LIMIT_S)
        self._decoder: Decoder[Any] = Decoder(ToFront)
        self._frames: list[tuple[Any, memoryview]] = []
        self._ids = itertools.count(1)

    def recv(self) -> tuple[Any, memoryview] | None:
        while not self._frames:
            try:
                data = self.socket.recv(1 << 18)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def hello(self) -> Hello:
        received = self.recv()
        assert received is not None and isinstance(received[0], Hello)
        return received[0]

    def load(
        self, directory: Path | str, handler: str = "service:handle", **fields: Any
    ) -> Loaded | LoadFailed:
        order: dict[str, Any] = {
            "model_name": "m",
            "model_dir": str(directory),
            "handler": handler,
            "batch_size": 1,
            "gpu_id": None,
            "manifest": "",
            "decode_input": True,
            "max_response_size": 1 << 20,
        }
        self.socket.sendall(b"".join(map(bytes, encode(Load(**order | fields)))))
        received = self.recv()
        assert received is not None, "the worker ended"
        assert isinstance(received[0], Loaded | LoadFailed)
        return received[0]

    def send(self, *requests: Request) -> int:
        """Sends a batch and does not wait. Returns its id."""
        batch_id = next(self._ids)
        made = [request.item() for request in requests]
        values = [value for _, values in made for value in values]
        batch = Predict(batch_id, [item for item, _ in made])
        self.socket.sendall(b"".join(map(bytes, encode(batch, values))))
        return batch_id

    def replies(self) -> tuple[Replies, list[Answer]]:
        received = self.recv()
        assert received is not None, "the worker ended"
        message, payload = received
        assert isinstance(message, Replies)
        bodies = cut(payload, [outcome.size for outcome in message.outcomes])
        return message, [
            Answer(outcome, bytes(body))
            for outcome, body in zip(message.outcomes, bodies, strict=True)
        ]

    def predict(self, *requests: Request | bytes) -> list[Answer]:
        made = [Request(given) if isinstance(given, bytes) else given for given in requests]
        batch_id = self.send(*made)
        message, answers = self.replies()
        assert message.batch_id == batch_id
        return answers

    def ask(self, request: Request | bytes = b"") -> Answer:
        (answer,) = self.predict(request)
        return answer


class Process(Wire):
    """A worker process. `with` ends it."""

    def __init__(
        self,
        home: Path,
        command: Sequence[str] = FRESH,
        *,
        env: Mapping[str, str] | None = None,
        more_wires: int = 0,
    ) -> None:
        pairs = [socket.socketpair() for _ in range(1 + more_wires)]
        super().__init__(pairs[0][0])
        self.others = [Wire(ours) for ours, _ in pairs[1:]]
        fds = [theirs.fileno() for _, theirs in pairs]
        home.mkdir(exist_ok=True)
        self._out, self._err = home / "stdout", home / "stderr"
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-I", *command, ",".join(map(str, fds))],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ | dict(env or {}),
            )
        for _, theirs in pairs:
            theirs.close()

    @property
    def out(self) -> str:
        """What it printed; complete once it has ended."""
        return self._out.read_text(errors="surrogateescape")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="surrogateescape")

    def exit_code(self) -> int:
        return self.process.wait(LIMIT_S)

    def end(self) -> int:
        """Lets go of the wire; its exit code."""
        for wire in (self, *self.others):
            wire.socket.close()
        return self.exit_code()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        for wire in (self, *self.others):
            wire.socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
