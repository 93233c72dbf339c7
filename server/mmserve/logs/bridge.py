"""From `logging` to the journal."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping

from mmserve.logs.escape import escaped, indented

#: What every record has; the rest is `extra`.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

Say = Callable[..., None]


def as_text(fields: Mapping[str, object]) -> str:
    """` key=value` for each, quoted where the value has blanks."""
    return "".join(f" {key}={_value(value)}" for key, value in fields.items())


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if not text or any(mark in text for mark in ' "='):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return escaped(text)


class Bridge(logging.Handler):
    """Hands records to `Journal.server`.

    A traceback is printed from ERROR on, where it is a bug of ours; below, an exception is its
    type and text. No line of a message but the first begins at the margin, so that none can pass
    for an entry of its own.
    """

    def __init__(self, say: Say) -> None:
        super().__init__()
        self._say = say

    def createLock(self) -> None:  # noqa: N802 - logging's spelling
        """None: the journal needs no lock, and a signal handler may log."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._say(
                record.levelno,
                record.name,
                _text(record),
                {key: value for key, value in vars(record).items() if key not in _OWN},
                thread="main" if record.threadName == "MainThread" else record.threadName,
            )
        except Exception as error:  # logging must not hurt whoever logs
            self._say(
                logging.ERROR,
                "mmserve.logs",
                f"a line of {record.pathname}:{record.lineno} cannot be logged: {error!r}",
            )


def _text(record: logging.LogRecord) -> str:
    text = indented(record.getMessage().rstrip("\n"))
    if not record.exc_info or record.exc_info[1] is None:
        return text
    error = record.exc_info[1]
    if record.levelno < logging.ERROR:
        return f"{text}: {type(error).__name__}: {escaped(str(error))}"
    trace = "".join(traceback.format_exception(error)).rstrip("\n")
    return f"{text}\n\t{indented(trace)}"


class Installed:
    """What `install` changed, to be put back."""

    def __init__(self, bridge: Bridge, level: int) -> None:
        root = logging.getLogger()
        self._before = root.handlers[:], root.level
        root.handlers[:] = [bridge]
        root.setLevel(level)
        logging.captureWarnings(True)

    def remove(self) -> None:
        root = logging.getLogger()
        root.handlers[:] = self._before[0]
        root.setLevel(self._before[1])
        logging.captureWarnings(False)


def install(say: Say, level: int) -> Installed:
    """Makes the bridge the only handler of the root logger."""
    return Installed(Bridge(say), level)
