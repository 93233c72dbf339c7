"""One worker process, seen from the front: its wire, its state, its numbers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec

from mmserve.errors import WorkersFailed
from mmserve.logs.pump import OutputPump
from mmserve.wire.framing import Bytes, Decoder, WireError, encode
from mmserve.wire.messages import Load, Loaded, LoadFailed, Replies, ToFront
from mmserve.workers.exits import Exit
from mmserve.workers.life import Event, Life, State
from mmserve.workers.zygote import Process, Zygote

log = logging.getLogger("mmserve.workers")

#: A worker that was told to stop and is idle ends by itself within this time, else it is killed.
STOP_GRACE_S = 2.0
#: How long the wire of an ended worker may still bring something; a child of it may hold it open.
LAST_WORDS_S = 0.5


class Worker:
    """A process with one model loaded, or on its way there.

    Attributes:
        model: name of its model.
        number: its place among the workers of its model, for the log.
        id: stable name of the slot, as `describe` shows it.
        gpu_id: its device, or None.
        start: "fork", "fresh" or "template"; `start_reason` says why it is not a plain fork.
        memory_bytes: resident memory as it last told.
        requests: answered by it, or failed by its handler.
        in_flight: batches sent and not answered.
        has_unread: it ended before it had read all that was sent.
        ended: done once its process is reaped and all it said is heard; None where it never had
            a process.
        outgrown: done once it has served or grown enough: it should be replaced.
        on_replies: called for each finished batch with its message and payload. Raises WireError
            where that is no answer to what was sent.
        on_lost: called once, when it closed its end of the wire: no batch reaches it any more.
        on_metrics: gets finished metric lines.
    """

    def __init__(
        self, zygote: Zygote, model: str, number: int, id: str, gpu_id: int | None
    ) -> None:
        self.model, self.number, self.id, self.gpu_id = model, number, id, gpu_id
        self.life = Life()
        self.start, self.start_reason = "fork", ""
        self.memory_bytes = self.requests = self.in_flight = 0
        self.load_s = 0.0
        self.ready_at = 0.0
        self.has_unread = False
        self.on_replies: Callable[[Replies, memoryview], None] | None = None
        self.on_lost: Callable[[Worker], None] | None = None
        self.on_metrics: Callable[[list[str]], None] | None = None
        self.process: Process | None = None
        self.pumps: list[OutputPump] = []  # of its stdout and stderr
        self._zygote = zygote
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[Exit | None] = self.loop.create_future()
        self.outgrown: asyncio.Future[None] = self.loop.create_future()
        self._loaded: asyncio.Future[Loaded] = self.loop.create_future()
        self._aborted: asyncio.Future[None] = self.loop.create_future()
        self._idle: asyncio.Future[None] | None = None  # somebody waits for the end of its work
        self._wire: _Wire | None = None
        self._killed_for = ""
        self._insists: asyncio.TimerHandle | None = None
        self._max_requests: int | None = None
        self._memory_limit: int | None = None

    @property
    def state(self) -> State:
        return self.life.state

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def was_used(self) -> bool:
        """It was given a batch, and may have begun it."""
        return self.requests > 0 or (self.in_flight > 0 and not self.has_unread)

    # Start

    async def attach(self, process: Process, wire: socket.socket) -> None:
        """The process is there; its end of `wire` is with it."""
        self.process = process
        try:
            wire.setblocking(False)
            _, self._wire = await self.loop.create_unix_connection(lambda: _Wire(self), sock=wire)
            self.life.move(Event.CONNECTED)
        finally:  # without a wire, too, somebody waits for its end
            process.exited.add_done_callback(self._process_exited)

    async def load(self, order: Load, timeout_s: float | None) -> Loaded:
        """Has the process load its model.

        Args:
            timeout_s: None for no limit.

        Raises:
            WorkersFailed: the handler refused, the process died, it took too long, or it was
                aborted.
        """
        self.send(order)
        try:
            async with asyncio.timeout(timeout_s):
                await first_of(self._loaded, self.ended)
        except TimeoutError:
            raise WorkersFailed(
                f"the model took longer than {timeout_s:g} s to load; "
                "load_timeout_seconds sets the limit"
            ) from None
        self.raise_if_aborted()
        if not self._loaded.cancelled():
            loaded = self._loaded.result()
            self.life.move(Event.LOADED)
            self.load_s, self.ready_at = loaded.load_s, time.monotonic()
            return loaded
        how = self.ended.result() or Exit(None)
        raise WorkersFailed(
            f"the worker ended while it loaded the model. {self._killed_for or how}",
            out_of_memory=not self._killed_for
            and (how.was_out_of_memory or how.code == -signal.SIGKILL),
        )

    def abort(self) -> None:
        """It is not wanted any more, though it is not ready: its start fails, soon."""
        self.ask_to_stop()
        if not self._aborted.done():
            self._aborted.set_result(None)
        self.kill("It was stopped while it started.")

    def raise_if_aborted(self) -> None:
        """Raises WorkersFailed."""
        if self._aborted.done():
            raise WorkersFailed("it was stopped")

    async def unless_aborted(self, waiting: Awaitable[Any]) -> None:
        """Waits for something that its start needs. Raises WorkersFailed once it is aborted."""
        task = asyncio.ensure_future(waiting)
        try:
            await first_of(task, self._aborted)
        finally:
            task.cancel()
        self.raise_if_aborted()

    # Work

    def send(
        self,
        message: msgspec.Struct,
        parts: Sequence[bytes | memoryview] = (),
        *,
        soon: bool = False,
    ) -> None:
        """Never blocks; what the socket does not take now is kept.

        Args:
            soon: at the end of this turn of the event loop will do, together with others.
        """
        if self._wire is not None:
            self._wire.send(message, parts, soon=soon)

    def set_limits(self, max_requests: int | None, memory_limit: int | None) -> None:
        """After so many requests, or above so many resident bytes, it is `outgrown`."""
        self._max_requests, self._memory_limit = max_requests, memory_limit

    def stay(self) -> None:
        """There is no successor: it is not `outgrown` until `outgrow`, or its next batch."""
        self.outgrown = self.loop.create_future()

    def outgrow(self) -> None:
        if not self.outgrown.done():
            self.outgrown.set_result(None)

    async def drained(self) -> None:
        """Returns once it has no batch, or has ended."""
        if self.in_flight and not self.ended.done():
            if self._idle is None:
                self._idle = self.loop.create_future()
            await first_of(self._idle, self.ended)

    # End

    def ask_to_stop(self) -> None:
        """No new batch from now on; what runs may finish."""
        if self.state is not State.STOPPED:
            self.life.move(Event.STOP_ASKED)

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End-of-file, then SIGKILL to its group. Returns when the process is reaped."""
        self.ask_to_stop()
        if self.process is None:
            self._end(None)
            return
        if not self.ended.done():
            if self._wire is not None:
                self._wire.close()
            if grace_s > 0:
                self._kill_in(grace_s, "")
            else:
                self.kill()
            await first_of(self.ended)

    def kill(self, why: str = "") -> None:
        """SIGKILL to its process group, now."""
        if self.process is not None and not self.process.exited.done():
            self._killed_for = self._killed_for or why
            self._zygote.kill(self.process)

    @property
    def is_killed(self) -> bool:
        """We have killed it, or will in a moment."""
        return self.process is not None and self.process.is_killed

    def end_text(self, how: Exit | None) -> str:
        """Why it ended, for the client whose request it had."""
        return self._killed_for or str(how or Exit(None))

    def _kill_in(self, delay_s: float, why: str) -> None:
        if self._insists is not None:
            self._insists.cancel()
        self._insists = self.loop.call_later(delay_s, self.kill, why)

    def _wire_lost(self, error: Exception | None) -> None:
        """End-of-file is a hint: its process ends now, or is of no use to anybody."""
        # Reset: the other end was closed with something left to read. Broken pipe: before we wrote.
        self.has_unread = isinstance(error, ConnectionError)
        assert self.process is not None and self._wire is not None
        if self.process.exited.done():
            self._end(self.process.exited.result())
            return
        if not self._wire.is_closed:
            self._kill_in(STOP_GRACE_S, "It closed its connection to the server.")
        if self.on_lost is not None:
            self.on_lost(self)

    def _process_exited(self, exited: asyncio.Future[Exit]) -> None:
        how = exited.result()
        if self._wire is None or self._wire.is_lost:
            self._end(how)
        else:  # what it said before its end may arrive after the news of it
            if self._insists is not None:
                self._insists.cancel()
            self._insists = self.loop.call_later(LAST_WORDS_S, self._end, how)

    def _end(self, how: Exit | None) -> None:
        if self.ended.done():
            return
        if self._insists is not None:
            self._insists.cancel()
        if self._wire is not None:
            self._wire.abort()
        while self.pumps:  # a process that it left behind may hold the other ends
            self.pumps.pop().close()
        if self.state is not State.STOPPED:
            self.life.move(Event.EXITED)
        if not self._loaded.done():
            self._loaded.cancel()
        self.ended.set_result(how)

    # The wire

    def heard(self, message: msgspec.Struct, payload: memoryview) -> None:
        """Raises WireError: the message makes no sense now."""
        if type(message) is Replies:
            if self.on_replies is None:
                raise WireError("an answer to nothing")
            self.on_replies(message, payload)
            self.requests += len(message.outcomes)
            if message.memory_bytes:
                self.memory_bytes = message.memory_bytes
                if self._memory_limit is not None and self.memory_bytes > self._memory_limit:
                    self.outgrow()
            if self._max_requests is not None and self.requests >= self._max_requests:
                self.outgrow()
            if self._idle is not None and not self.in_flight:
                self._idle.set_result(None)
                self._idle = None
            if message.metrics and self.on_metrics is not None:
                self.on_metrics(message.metrics)
        elif isinstance(message, Loaded):
            if not self._loaded.done():
                self._loaded.set_result(message)
            if message.metrics and self.on_metrics is not None:
                self.on_metrics(message.metrics)
        elif isinstance(message, LoadFailed) and not self._loaded.done():
            self._loaded.set_exception(
                WorkersFailed(
                    message.cause, out_of_memory=message.out_of_memory, trace=message.trace
                )
            )
            self._loaded.exception()  # retrieved: nobody may be waiting any more


class _Wire(asyncio.Protocol):
    """The front's end of a worker's socket pair.

    What the socket does not take at once is kept: it is bounded by a few batches of requests.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._heard = worker, worker.heard
        self._feed = Decoder[ToFront](ToFront).feed
        self._transport: asyncio.Transport | None = None
        self._unsent: list[Bytes] = []
        self._is_flush_due = False
        self.is_closed = False  # by us
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._worker._wire_lost(error)

    def data_received(self, data: bytes) -> None:
        try:
            for message, payload in self._feed(data):
                self._heard(message, payload)
        except WireError as error:
            log.error("a worker's message makes no sense", extra={"cause": str(error)})
            self.abort()
            self._worker.kill("It sent what makes no sense.")

    def send(
        self, message: msgspec.Struct, parts: Sequence[bytes | memoryview], *, soon: bool
    ) -> None:
        self._unsent += encode(message, parts)
        if not soon:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._worker.loop.call_soon(self._flush_now_due)

    def _flush_now_due(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        data, self._unsent = self._unsent, []
        if not data or self._transport is None or self._transport.is_closing():
            return
        if len(data) == 1:
            self._transport.write(data[0])
        else:
            self._transport.writelines(data)

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes without waiting for what is not sent: nobody may read it."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()


async def first_of(*futures: asyncio.Future[Any]) -> None:
    """Returns when one of them is done; cancels none."""
    await asyncio.wait(set(futures), return_when=asyncio.FIRST_COMPLETED)


def pipe_for_output() -> tuple[int, int]:
    """A pipe for a worker's stdout or stderr: our non-blocking read end, its write end."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    return read, write
