"""`mmserve run`: one model in a child of this process, without a server around it.

The child is a worker: module path, context, decoding and errors are a worker's, and the replies
are made by the code that makes the server's.
"""

from __future__ import annotations

import argparse
import contextlib
import mimetypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmserve.errors import BadRequest, PredictionFailed, ServeError, WorkerDied, WorkersFailed
from mmserve.wire.channel import Channel
from mmserve.wire.framing import cut
from mmserve.wire.messages import (
    Hello,
    Item,
    Load,
    Loaded,
    LoadFailed,
    Outcome,
    Predict,
    Replies,
    ToFront,
)

if TYPE_CHECKING:
    from mmserve.frontend.forms import Parameters
    from mmserve.frontend.http import Response

DONE, FAILED, USAGE = 0, 1, 2

_MAX_RESPONSE_SIZE = 1 << 40  # bytes: a developer may look at any
_MEGABYTE = 1_000_000
_WAIT_S = 5.0


class Usage(Exception):
    """The command line asks for what is not there; the text is for the user."""


class Input(NamedTuple):
    """One request.

    Attributes:
        shown: what the report calls it.
        headers: as a client would send them.
        parameters: what the handler sees.
    """

    shown: str
    headers: list[tuple[str, str]]
    parameters: Parameters


def run(flags: argparse.Namespace) -> int:
    """The command, whose flags `main` knows. Its exit code."""
    # Of the group that a terminal's Ctrl-C and a supervisor's SIGTERM go to, the child decides
    # what the first means; the second ends both, and the unpacked archive goes.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        inputs = _inputs(flags)
        with _model(flags) as order, _Child(order, debug=flags.pdb) as child:
            return _played(child, inputs, flags)
    except Usage as error:
        print(f"mmserve run: {error}", file=sys.stderr)
        return USAGE
    except ServeError as error:
        _say(f"load: {_status_line(error)}")
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _: object) -> None:
    sys.exit(128 + number)


# What is sent


def _inputs(flags: argparse.Namespace) -> list[Input]:
    """Raises Usage."""
    if flags.output and len(flags.output) != len(flags.input):
        raise Usage("give --output as often as --input, or not at all")
    if flags.input.count("-") > 1:
        raise Usage("the standard input can be read once")
    if flags.pdb and "-" in flags.input:
        raise Usage("with --pdb the standard input belongs to the debugger; name a file")
    return [_input(name, flags) for name in flags.input]


def _input(name: str, flags: argparse.Namespace) -> Input:
    from mmserve.frontend.forms import body_parameters

    try:
        body = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise Usage(f"{name} cannot be read: {error.strerror}") from None
    headers = list(flags.header)
    content_type = flags.content_type
    if content_type is None and not any(key.lower() == "content-type" for key, _ in headers):
        content_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    if content_type is not None:
        headers.append(("Content-Type", content_type))
    kind = next(value for key, value in reversed(headers) if key.lower() == "content-type")
    try:
        return Input(name, headers, body_parameters(kind, body))
    except BadRequest as error:
        raise Usage(f"{name}: {error}") from None


@contextlib.contextmanager
def _model(flags: argparse.Namespace) -> Iterator[Load]:
    """The order to load the model, which lies on the disk until the end of the block.

    Raises:
        Usage: there is nothing at this path.
        ServeError: what there is is no model.
    """
    from mmserve.models.archive import unpack
    from mmserve.models.manifest import default_model_name

    path = Path(flags.model)
    with contextlib.ExitStack() as stack:
        bounds = None
        directory = path
        if not path.is_dir():
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise Usage(f"{path} cannot be read: {error.strerror}") from None
            stack.callback(os.close, fd)
            temporary = tempfile.TemporaryDirectory(prefix="mmserve-run-")
            directory = bounds = Path(stack.enter_context(temporary)).resolve() / "model"
            directory.mkdir()
            unpack(fd, str(directory), name=path.name)
        yield _order(flags, directory.resolve(), bounds, default_model_name(path.name) or "model")


def _order(flags: argparse.Namespace, directory: Path, bounds: Path | None, name: str) -> Load:
    from mmserve.models.layout import read_layout
    from mmserve.models.manifest import Overrides, resolve
    from mmserve.models.torchserve import may_be_torchserve, refuse_unserved

    layout = read_layout(directory, bounds)
    if may_be_torchserve(layout.manifest):
        python_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        refuse_unserved(layout, flags.handler, [*filter(None, python_path), *sys.path])
    wanted = Overrides(model_name=flags.name, handler=flags.handler, default_name=name)
    resolved = resolve(layout.manifest, wanted)
    return Load(
        model_name=resolved.name,
        model_dir=layout.directory,
        handler=resolved.handler,
        batch_size=len(flags.input) if flags.batch else 1,
        gpu_id=flags.gpu,
        manifest=layout.manifest.text,
        decode_input=True,
        max_response_size=_MAX_RESPONSE_SIZE,
    )


# The worker


class _Child:
    """A worker with the model loaded; its end is that of the `with` block.

    What the handler prints goes to the standard error, so that the standard output has answers
    and nothing else.

    Raises:
        WorkersFailed: it could not be loaded.
    """

    def __init__(self, order: Load, *, debug: bool) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-m", "mmserve.runtime.foreground", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, *(["--pdb"] if debug else [])],
                pass_fds=[theirs.fileno()],
                stdout=2,
            )
        self._channel = Channel(ours, ToFront)
        self._order = order
        self.loaded = Loaded(0.0, [])

    def __enter__(self) -> _Child:
        self._on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._load()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._channel.socket.close()
        if kind is SystemExit:  # nobody waits for what the handler is busy with
            self._process.kill()
        try:
            self._process.wait(_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        signal.signal(signal.SIGINT, self._on_interrupt)

    def private_bytes(self) -> int | None:
        """Private_Dirty of the process; None where the system does not tell.

        Without mapped pages of files that are not on the disk yet, which count as dirty too: those
        of an archive that was unpacked a moment ago.
        """
        try:
            rollup = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text()
        except OSError:
            return None
        found = re.findall(r"^(?:Private_Dirty|Anonymous): +(\d+) kB$", rollup, re.MULTILINE)
        return min(map(int, found)) * 1024 if len(found) == 2 else None

    def _load(self) -> None:
        if not isinstance(self._receive()[0], Hello):
            raise WorkersFailed("the worker did not start")
        memory = Memory(self.private_bytes())
        self._channel.send(self._order)
        answer, _ = self._receive()
        if isinstance(answer, LoadFailed):
            _say(answer.trace.rstrip("\n"))
            raise WorkersFailed(answer.cause, out_of_memory=answer.out_of_memory)
        if not isinstance(answer, Loaded):
            raise WorkersFailed(self._end())
        self.loaded = answer
        self.memory = memory
        _say(f"load: {answer.load_s:.3f} s, {memory.grown(self.private_bytes())}")

    def predict(
        self, number: int, inputs: Sequence[Input]
    ) -> tuple[Replies | None, list[Response]]:
        """The answers to one batch; no Replies where the process ended over it."""
        from mmserve.frontend.inference import reply_to

        items, parts = [], []
        for at, each in enumerate(inputs):
            items.append(
                Item(f"run-{number + at}", each.headers, [entry for entry, _ in each.parameters])
            )
            parts += [value for _, value in each.parameters if value]
        with contextlib.suppress(ConnectionError):
            self._channel.send(Predict(number, items), parts)
        answer, payload = self._receive()
        if not isinstance(answer, Replies):
            died = WorkerDied(self._end())
            return None, [reply_to(died) for _ in inputs]
        bodies = cut(payload, [outcome.size for outcome in answer.outcomes])
        outcomes = zip(answer.outcomes, bodies, strict=True)
        return answer, [_response(outcome, body) for outcome, body in outcomes]

    def _receive(self) -> tuple[object, bytearray | memoryview]:
        try:
            received = self._channel.recv()
        except ConnectionError:
            received = None
        return received if received is not None else (None, bytearray())

    def _end(self) -> str:
        """How the process ended."""
        code = self._process.wait()
        if code >= 0:
            return f"Its process ended with status {code}."
        return f"Its process was ended by {signal.Signals(-code).name}."


def _response(outcome: Outcome, body: memoryview) -> Response:
    from mmserve.frontend.inference import reply_to
    from mmserve.scheduling.job import Result

    if outcome.error is None:
        headers = outcome.headers
        return reply_to(Result(outcome.status, outcome.phrase, headers, body, outcome.is_json))
    if outcome.is_bad_request:
        return reply_to(BadRequest(outcome.error))
    return reply_to(PredictionFailed(outcome.status, outcome.error))


# The report


class Memory:
    """Private memory, and what it has grown by since the last look."""

    def __init__(self, last: int | None) -> None:
        self._last = last

    def grown(self, now: int | None) -> str:
        if now is None:
            return "private memory unknown"
        before, self._last = self._last, now
        text = f"{now / _MEGABYTE:.1f} MB private"
        return text if before is None else f"{text} ({(now - before) / _MEGABYTE:+.1f} MB)"


def _played(child: _Child, inputs: list[Input], flags: argparse.Namespace) -> int:
    batches = [inputs] if flags.batch else [[each] for each in inputs]
    code, at = DONE, 0
    for metric in child.loaded.metrics:
        _say(f"metric: {metric}")
    for batch in batches:
        replies, answers = child.predict(at + 1, batch)
        if replies is not None:
            of = batch[0].shown if len(batch) == 1 else f"batch of {len(batch)}"
            took = f"{replies.handler_s * 1e3:.1f} ms"
            _say(f"{of}: {took}, {child.memory.grown(child.private_bytes())}")
            for metric in replies.metrics:
                if not metric.startswith("PredictionTime."):
                    _say(f"metric: {metric}")
        for each, answer in zip(batch, answers, strict=True):
            _show(each.shown, answer, flags.output[at] if flags.output else None, len(inputs) > 1)
            if answer.status >= HTTPStatus.BAD_REQUEST:
                code = FAILED
            at += 1
        if replies is None:
            if at < len(inputs):
                _say(f"{len(inputs) - at} more inputs were not sent.")
            return FAILED
    return code


def _show(name: str, answer: Response, output: str | None, is_one_of_many: bool) -> None:
    """Raises Usage when the body cannot be written where it should go."""
    _say(f"{name}: {answer.status} {_phrase(answer.status, answer.reason)}")
    for key, value in answer.headers:
        _say(f"{key}: {value}")
    body = bytes(answer.body)
    if output is not None:
        try:
            Path(output).write_bytes(body)
        except OSError as error:
            raise Usage(f"{output} cannot be written: {error.strerror}") from None
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(body)
    if not body.endswith(b"\n") and (is_one_of_many or sys.stdout.isatty()):
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def _phrase(status: int, chosen: str | None) -> str:
    if chosen:
        return chosen
    with contextlib.suppress(ValueError):
        return HTTPStatus(status).phrase
    return ""


def _status_line(error: ServeError) -> str:
    from mmserve.frontend.problems import status_of

    status = status_of(error)
    return f"{status} {_phrase(status, None)}: {error}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
