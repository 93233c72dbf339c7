"""The process a model lives in: what it is before the model's code runs, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
from typing import NoReturn

#: What the model's code has registered to run at the end gets so long; then the process ends. The
#: front kills a worker that takes longer than two seconds, and nobody would know what it did.
END_LIMIT_S = 1.5

COMPAT_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compat")

_RESET_SIGNALS = ("SIGTERM", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT")


def prepare(*, is_fork: bool) -> None:
    """Makes the process what a fresh interpreter would be, with Multi Model Server's logging.

    Args:
        is_fork: it is a copy of another process and has that one's signal handlers, arguments and
            random numbers.
    """
    _open_text_streams()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO, force=True)
    # A handler that reads the command line finds none.
    sys.argv[1:] = []
    if COMPAT_DIR not in sys.path:
        sys.path.append(COMPAT_DIR)  # last, so that an installed `mms` comes first
    if is_fork:
        _reset_signals()
        take_own_random_numbers()


def _open_text_streams() -> None:
    """stdout and stderr take any text and say it at once, whatever the locale.

    What has no UTF-8 form (a lone surrogate) is written as an escape: a print must not fail a
    prediction.
    """
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        try:
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
        except (AttributeError, ValueError, OSError):
            with contextlib.suppress(OSError):
                raw = io.FileIO(fd, "w", closefd=False)
                stream = io.TextIOWrapper(
                    io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True
                )
                setattr(sys, name, stream)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for name in _RESET_SIGNALS:
        number = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def take_own_random_numbers() -> None:
    """Python's generator is seeded anew after a fork, numpy's is not: all forks would agree."""
    random = sys.modules.get("numpy.random")
    if random is not None:
        with contextlib.suppress(Exception):
            random.seed()


def take_own_threads() -> None:
    """As many threads for PyTorch's operators as the model's environment wants.

    OpenMP has read `OMP_NUM_THREADS` when the process that we are a fork of imported PyTorch, for
    which it is 1. Not to be done before a load that is to be forked: it may start threads.
    """
    torch = sys.modules.get("torch")
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if torch is not None and wanted.isdecimal() and int(wanted) > 0:
        with contextlib.suppress(Exception):
            if torch.get_num_threads() != int(wanted):
                torch.set_num_threads(int(wanted))


def say(text: str) -> None:
    """A line for the log; it never raises, whatever the handler did to the streams."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def leave(code: int) -> NoReturn:
    """Ends the process, with what a regular end of Python does, but never without end.

    Threads that are no daemons are waited for and `atexit` functions run; after `END_LIMIT_S` the
    process ends all the same, and the log shows what it was busy with. Nothing of the caller's
    stack is unwound: in a fork it belongs to another process.
    """
    with contextlib.suppress(Exception):
        faulthandler.dump_traceback_later(END_LIMIT_S, exit=True, file=2)
    # As the children of multiprocessing do it.
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # not in typeshed
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
