"""A worker's main: greets the front, loads the model, answers batches until the front is gone."""

from __future__ import annotations

import os
import socket
import time
from typing import NoReturn

from mmserve.runtime.batch import Predictor
from mmserve.runtime.failures import LoadProblem, trace_of
from mmserve.runtime.loading import LoadedModel, load_model
from mmserve.runtime.process import (
    leave,
    prepare,
    say,
    take_own_random_numbers,
    take_own_threads,
)
from mmserve.wire.channel import Channel
from mmserve.wire.messages import Hello, Load

#: Exit status after a handler ended the process with one that looks like success.
ENDED_BY_HANDLER = 1
LOAD_FAILED = 1

_MEMORY_EVERY_S = 1.0
_MEMORY_EVERY_BATCHES = 100


def run_worker(channel_fd: int, *, start: str) -> NoReturn:
    """The whole life of a worker in this process.

    Args:
        channel_fd: our end of the socket pair.
        start: "fork" in a fork of the zygote or its library, "fresh" in an interpreter of our own.
    """
    code = 0
    try:
        channel = Channel(socket.socket(fileno=channel_fd))
        model = introduce(channel, start=start)
        if model is None:
            code = LOAD_FAILED
        else:
            serve_batches(channel, model)
    except BaseException as error:
        code = _exit_code(error)
    leave(code)


def run_loaded(channel_fd: int, model: LoadedModel) -> NoReturn:
    """The life of a worker that was forked from a template: the model is there."""
    code = 0
    try:
        channel = Channel(socket.socket(fileno=channel_fd))
        channel.send(Hello(os.getpid(), "template"))
        received = channel.recv()
        if received is not None:
            model.take(_order(received[0]))
            take_own_threads()
            take_own_random_numbers()
            channel.send(model.loaded())
            serve_batches(channel, model)
    except BaseException as error:
        code = _exit_code(error)
    leave(code)


def introduce(channel: Channel, *, start: str) -> LoadedModel | None:
    """Greets the front and loads the model that it names.

    Returns:
        The model; None when it could not be loaded, which the front has been told, or the front
        is gone.
    """
    prepare(is_fork=start != "fresh")
    if start == "fork":
        take_own_threads()
    channel.send(Hello(os.getpid(), start))
    received = channel.recv()
    if received is None:
        return None
    try:
        model = load_model(_order(received[0]))
    except LoadProblem as problem:
        channel.send(problem.message)
        return None
    channel.send(model.loaded())
    return model


def _order(message: object) -> Load:
    if not isinstance(message, Load):
        raise TypeError(f"the first message is {type(message).__name__}, not Load")
    return message


def serve_batches(channel: Channel, model: LoadedModel) -> None:
    """Answers batches, one at a time, until the front is gone.

    Raises:
        HandlerEnded: the handler wants the process to end; the log knows it.
    """
    channel.close_in_children()
    order = model.order
    predictor = Predictor(
        model.entry,
        model.context,
        say,
        decode=order.decode_input,
        max_response_size=order.max_response_size,
    )
    memory = _Memory()
    busy_poll_s = order.busy_poll_s
    try:
        while (received := channel.recv()) is not None:
            batch, payload = received
            replies, bodies = predictor.answer(batch, payload)
            replies.memory_bytes = memory.due()
            channel.send(replies, bodies)
            channel.awake_s = busy_poll_s if replies.handler_s < busy_poll_s else 0.0
    except ConnectionError:
        return  # the front is gone; there is nobody to tell
    except (SystemExit, KeyboardInterrupt) as ended:
        raise HandlerEnded(_exit_code(ended)) from None


class HandlerEnded(SystemExit):
    """The model's code ended the process it lives in. The code is never 0."""


class _Memory:
    """Resident memory, read now and then: it costs as much as a batch.

    `mmserve.platform` could tell, but would bring ctypes and pathlib into every worker.
    """

    def __init__(self) -> None:
        self._next_at, self._left = 0.0, 0

    def due(self) -> int:
        """Bytes; 0 when it is not time to read it, or there is no way to."""
        self._left -= 1
        now = time.monotonic()
        if now < self._next_at and self._left > 0:
            return 0
        self._next_at, self._left = now + _MEMORY_EVERY_S, _MEMORY_EVERY_BATCHES
        try:
            with open("/proc/self/statm", "rb", buffering=0) as statm:
                return int(statm.read(100).split()[1]) * _PAGE_SIZE
        except (OSError, ValueError, IndexError):
            return 0


_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


def _exit_code(error: BaseException) -> int:
    """Says why the process ends. A handler's `sys.exit(0)` must not look like a clean end."""
    if isinstance(error, HandlerEnded):
        return int(error.code or ENDED_BY_HANDLER)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else ENDED_BY_HANDLER
        say(f"The handler ended its process: SystemExit({error.code!r}).")
        return code & 0xFF or ENDED_BY_HANDLER
    say(trace_of(error).rstrip("\n"))
    return ENDED_BY_HANDLER
