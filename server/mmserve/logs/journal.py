"""All the log files of the front, and what goes to standard output.

Lines are put together by whoever has something to say and appended to lists; a thread writes
them. Names and forms of the files are those of Multi Model Server (log4j2.xml of 1.1.11), each
line once, and the output of workers in `model_log.log`.

| `log_to` | files | standard output |
| --- | --- | --- |
| `files` | everything | the server's own lines; not those of requests, metrics and workers |
| `stdout` | nothing | everything |
| `both` | everything | everything |

`log_level` is the least level of the server's own lines, and of all lines on standard output,
where requests, metrics and a worker's stdout are INFO and a worker's stderr is WARN.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from mmserve.config.settings import Settings
from mmserve.logs import bridge
from mmserve.logs.backlog import Backlog
from mmserve.logs.escape import escaped
from mmserve.logs.files import LogFile
from mmserve.logs.stamp import Stamp
from mmserve.logs.terminal import Terminal
from mmserve.logs.writer import Outlet, Paper, Writer

#: Of lines that wait for one output. At 30 000 requests a second some three seconds' worth.
BACKLOG_BYTES = 8 * 1024 * 1024
#: A text that is longer is cut; a traceback may quote a whole request.
TEXT_LIMIT = 64 * 1024
CLOSE_TIMEOUT_S = 2.0

ACCESS, METRICS, MODEL_METRICS = "ACCESS_LOG", "MMS_METRICS", "MODEL_METRICS"
WORKER = "com.amazonaws.ml.mms.wlm.WorkerLifeCycle"

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PADDED = {
    logging.DEBUG: "DEBUG",
    logging.INFO: "INFO ",
    logging.WARNING: "WARN ",
    logging.ERROR: "ERROR",
    logging.CRITICAL: "FATAL",
}

Fields = Mapping[str, object]
#: Makes a line: time, level, thread, logger, text, fields.
Form = Callable[[float, int, str, str, str, Fields | None], str]


class WorkerLine(Protocol):
    """A line that a worker printed (`output.OutputLine`)."""

    @property
    def text(self) -> str: ...
    @property
    def is_metric(self) -> bool: ...


class _Channel:
    """Where lines of one kind go."""

    __slots__ = ("others", "plain")

    def __init__(self) -> None:
        #: Gets `{time} - {text}`.
        self.plain: Backlog | None = None
        #: Each from a level on, in a form of its own.
        self.others: tuple[tuple[int, Form, Backlog], ...] = ()

    def put(
        self, now: float, level: int, thread: str, logger: str, text: str, fields: Fields | None
    ) -> None:
        for least, form, backlog in self.others:
            if level >= least:
                backlog.put(form(now, level, thread, logger, text, fields))


class Journal:
    """What can be logged. The methods are cheap, may be called by any thread, and never raise.

    Attributes:
        is_json: lines are JSON objects; those who know fields may pass them.
        keeps_access: somebody sees what is given to `access`.
    """

    def __init__(self, settings: Settings, stdout: int | None) -> None:
        """Opens the files; `start` begins to write."""
        self.is_json = settings.log_format == "json"
        to: str = settings.log_to
        self._level = LEVELS[settings.log_level]
        self._stamp = Stamp()
        self._utc = Stamp(utc=True)
        self._json = msgspec.json.Encoder(enc_hook=str)
        self._server_form = self._json_line if self.is_json else self._server_line
        self._access, self._metric, self._model_metric = _Channel(), _Channel(), _Channel()
        self._model, self._server, self._announce = _Channel(), _Channel(), _Channel()

        self._bridge: bridge.Installed | None = None
        self._terminal: Outlet | None = None
        if stdout is not None:
            with contextlib.suppress(OSError):
                self._terminal = self._outlet(Terminal(stdout), self._server_form, "mmserve.logs")
        files: list[Outlet] = []
        refused: dict[Path, OSError] = {}
        logs, metrics = Path(settings.log_location), Path(settings.metrics_location)
        for channel, folder, name, logger in (
            (self._server, logs, "mms_log.log", "mmserve.logs"),
            (self._access, logs, "access_log.log", ACCESS),
            (self._model, logs, "model_log.log", WORKER),
            (self._metric, metrics, "mms_metrics.log", METRICS),
            (self._model_metric, metrics, "model_metrics.log", MODEL_METRICS),
        ):
            of_server = channel is self._server or channel is self._model
            outlet = None
            if to != "stdout":
                form = self._server_form if of_server or self.is_json else self._plain_line
                try:
                    outlet = self._outlet(LogFile(folder / name), form, logger)
                except OSError as error:
                    refused[folder] = error
            if outlet is not None:
                files.append(outlet)
                if form == self._plain_line:
                    channel.plain = outlet.backlog
                else:
                    least = self._level if channel is self._server else 0
                    channel.others += ((least, form, outlet.backlog),)
                    if channel is self._server:
                        self._announce.others += ((0, form, outlet.backlog),)
            if self._terminal and (outlet is None or to == "both" or channel is self._server):
                channel.others += ((self._level, self._server_form, self._terminal.backlog),)
        if self._terminal:
            form = self._json_line if self.is_json else self._bare_line
            self._announce.others += ((0, form, self._terminal.backlog),)

        self.keeps_access = self._keeps(self._access)
        self._writers: list[Writer] = []
        if files:
            self._writers.append(Writer("log-files", files))
        if self._terminal:
            # A thread of its own: a pipe that nobody reads must not stop the files.
            self._writers.append(Writer("log-stdout", [self._terminal]))
        if refused:
            self._report(_refusal(refused))

    def _outlet(self, paper: Paper, form: Form, logger: str) -> Outlet:
        paper.open(time.time())

        def notice(text: str) -> str:
            return form(time.time(), logging.WARNING, "main", logger, text, None)

        return Outlet(Backlog(BACKLOG_BYTES), paper, notice, self._report)

    def _keeps(self, channel: _Channel) -> bool:
        least = min((least for least, _, _ in channel.others), default=logging.CRITICAL)
        return channel.plain is not None or least <= logging.INFO

    def leave_stdout(self) -> None:
        """From now on lines of the server that go to a file go there alone."""
        terminal = self._terminal.backlog if self._terminal else None
        elsewhere = tuple(other for other in self._server.others if other[2] is not terminal)
        if elsewhere:
            self._server.others = elsewhere

    def _report(self, text: str) -> None:
        self.server(logging.WARNING, "mmserve.logs", text)

    # What is said

    def request(
        self, now: float, access: str | None, counter: str, fields: Fields | None = None
    ) -> None:
        """A request that was answered: what `access` and `metric` write, at the price of one.

        Args:
            now: epoch seconds.
            access: an `access_line`, None where the access log leaves this one out.
            counter: of `RequestCounters`.
            fields: of the access line, where `is_json`.
        """
        channel = self._metric
        if (plain := channel.plain) is not None:
            stamp = self._stamp.of(now)
            plain.put(f"{stamp} - {counter}\n")
            if access is not None and (plain := self._access.plain) is not None:
                plain.put(f"{stamp} - {access}\n")
                access = access if self._access.others else None
        if channel.others:
            channel.put(now, logging.INFO, "main", METRICS, counter, None)
        if access is not None:
            self.access(access, fields)

    def access(self, text: str, fields: Fields | None = None) -> None:
        """A request, as `access_line` has it."""
        self._put(self._access, ACCESS, text, fields)

    def metric(self, text: str) -> None:
        """A metric of the host or the server, as a finished metric line."""
        self._put(self._metric, METRICS, text, None)

    def model_metric(self, text: str) -> None:
        """A metric of a model, as a finished metric line."""
        self._put(self._model_metric, MODEL_METRICS, escaped(text), None)

    def _put(self, channel: _Channel, logger: str, text: str, fields: Fields | None) -> None:
        now = time.time()
        if channel.plain is not None:
            channel.plain.put(f"{self._stamp.of(now)} - {text}\n")
        if channel.others:
            channel.put(now, logging.INFO, "main", logger, text, fields)

    def model(self, name: str, pid: int, stream: str, text: str) -> None:
        """A line that a worker printed.

        Args:
            name: the worker's, `worker_name(model, number)`.
            stream: `stdout` or `stderr`.
        """
        level = logging.WARNING if stream == "stderr" else logging.INFO
        fields = {"pid": pid} if self.is_json else None
        text = escaped(text)
        self._model.put(time.time(), level, f"{name}-{stream}", WORKER, text, fields)

    def model_lines(self, name: str, pid: int, stream: str, lines: Iterable[WorkerLine]) -> None:
        """What an `OutputReader` gave: text to `model`, metrics to `model_metric`."""
        for line in lines:
            if line.is_metric:
                self.model_metric(line.text)
            else:
                self.model(name, pid, stream, line.text)

    def server(
        self,
        level: int,
        logger: str,
        text: str,
        fields: Fields | None = None,
        *,
        thread: str = "main",
    ) -> None:
        """A line of the server's own; code says it through `logging`.

        Args:
            level: of `logging`.
            text: may have several lines; whoever quotes a stranger escapes it.
        """
        if len(text) > TEXT_LIMIT:
            text = f"{text[:TEXT_LIMIT]} … ({len(text)} characters)"
        self._server.put(time.time(), level, thread, logger, text, fields)

    def announce(self, text: str) -> None:
        """Bare on standard output, whatever `log_to` and `log_level` say: what scripts wait for.

        Multi Model Server says `Model server started.` so.
        """
        self._announce.put(time.time(), logging.INFO, "main", "mmserve.serve", text, None)

    # How lines look

    def _plain_line(
        self, now: float, level: int, thread: str, logger: str, text: str, fields: Fields | None
    ) -> str:
        return f"{self._stamp.of(now)} - {text}\n"

    def _server_line(
        self, now: float, level: int, thread: str, logger: str, text: str, fields: Fields | None
    ) -> str:
        padded = _PADDED.get(level) or logging.getLevelName(level)
        if fields:
            head, newline, trace = text.partition("\n")
            text = f"{head}{bridge.as_text(fields)}{newline}{trace}"
        return f"{self._stamp.of(now)} [{padded}] {thread} {logger} - {text}\n"

    def _bare_line(
        self, now: float, level: int, thread: str, logger: str, text: str, fields: Fields | None
    ) -> str:
        return f"{text}\n"

    def _json_line(
        self, now: float, level: int, thread: str, logger: str, text: str, fields: Fields | None
    ) -> str:
        line: dict[str, object] = {
            "ts": self._utc.of(now),
            "level": (_PADDED.get(level) or logging.getLevelName(level)).strip(),
            "logger": logger,
            "thread": thread,
            "message": text,
        }
        if fields:
            line |= {key: value for key, value in fields.items() if key not in line}
        try:
            return self._json.encode(line).decode() + "\n"
        except (ValueError, TypeError, RecursionError):
            # A lone surrogate, or a field that no encoder knows.
            plain = {
                key: str(value).encode("utf-8", "backslashreplace").decode()
                for key, value in line.items()
            }
            return self._json.encode(plain).decode() + "\n"

    # Its life

    def start(self) -> None:
        for writer in self._writers:
            writer.start()

    def install_logging(self) -> None:
        """From now on what code logs with `logging`, and every warning, goes to `server`."""
        self._bridge = bridge.install(self.server, self._level)

    def reopen(self) -> None:
        """Opens all files again, soon: somebody moved them (SIGHUP)."""
        for writer in self._writers:
            writer.reopen()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Waits until all is written that was said before. False where it cannot be."""
        deadline = time.monotonic() + timeout_s
        written = [writer.flush(max(0.0, deadline - time.monotonic())) for writer in self._writers]
        return all(written)

    def close(self) -> None:
        """Writes what waits, in two seconds at most, and ends the threads."""
        if self._bridge is not None:
            self._bridge.remove()
            self._bridge = None
        for writer in self._writers:
            writer.close(CLOSE_TIMEOUT_S)


@contextlib.contextmanager
def open_journal(settings: Settings, *, stdout: int | None = 1) -> Iterator[Journal]:
    """The log files of `log_location` and `metrics_location`; all exist from here on.

    A folder that cannot be written costs a warning, and its lines go to standard output.

    Args:
        stdout: a file descriptor, or None for no such output.
    """
    journal = Journal(settings, stdout)
    journal.start()
    try:
        yield journal
    finally:
        journal.close()


def _refusal(refused: Mapping[Path, OSError]) -> str:
    why = "; ".join(f"{folder.absolute()}: {error.strerror}" for folder, error in refused.items())
    return f"log files cannot be written, their lines go to standard output instead ({why})"
