"""`python -I -m mmserve.runtime.foreground FD [--pdb]`: the worker behind `mmserve run`.

A worker as any other, but for standard input, which stays the terminal's, and for the debugger.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from mmserve.runtime.failures import HandlerProblem, LoadProblem, cause_of
from mmserve.runtime.loading import Entry, LoadedModel, load_model
from mmserve.runtime.process import leave, prepare, say
from mmserve.runtime.worker import HandlerEnded, introduce, serve_batches
from mmserve.wire.channel import Channel
from mmserve.wire.messages import Hello, Load

Stop = Callable[[BaseException], object]


def run(channel_fd: int, stop: Stop | None) -> NoReturn:
    """Loads one model and answers batches until the other end is gone.

    Args:
        stop: called with what the model's code raises, while it loads or later.
    """
    channel = Channel(socket.socket(fileno=channel_fd))
    code = 0
    try:
        if stop is None:
            model = introduce(channel, start="fresh")
        else:
            model = _introduce_debugged(channel, stop)
        if model is None:
            code = 1
        else:
            serve_batches(channel, model)
    except HandlerEnded as ended:
        code = int(ended.code or 1)
    leave(code)


def _introduce_debugged(channel: Channel, stop: Stop) -> LoadedModel | None:
    """As `worker.introduce`, for a model that stops where it raises."""
    prepare(is_fork=False)
    channel.send(Hello(os.getpid(), "fresh"))
    received = channel.recv()
    if received is None or not isinstance(received[0], Load):
        return None
    try:
        model = load_model(received[0])
    except LoadProblem as problem:
        if not isinstance(problem.error, HandlerProblem):  # which no code of the model's raised
            stop(problem.error)
        channel.send(problem.message)
        return None
    model.entry = stopping(model.entry, stop)
    channel.send(model.loaded())
    return model


def stopping(entry: Entry, stop: Stop) -> Entry:
    """The entry point, with `stop` called for what it raises before that goes on its way."""

    def stopped(data: Any, context: Any) -> Any:
        try:
            return entry(data, context)
        except Exception as error:
            stop(error)
            raise

    return stopped


def main() -> NoReturn:
    fd, stop = int(sys.argv[1]), None
    if "--pdb" in sys.argv[2:]:
        stop = _debugger()
    run(fd, stop)


def _debugger() -> Stop:
    import pdb  # before the model's own modules can hide those that it imports

    def stop(error: BaseException) -> None:
        say(cause_of(error))
        pdb.post_mortem(error.__traceback__)

    return stop


if __name__ == "__main__":
    # By its name, so that its frames are known for ours and left out of tracebacks.
    from mmserve.runtime import foreground

    foreground.main()
