"""One worker process, seen from the front: its wire, its state, its numbers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec

from mmserve.errors import WorkersFailed
from mmserve.logs.pump import OutputPump
from mmserve.wire.framing import Decoder, WireError, encode
from mmserve.wire.messages import Hello, Load, Loaded, LoadFailed, Replies, ToFront
from mmserve.workers.life import Event, Life, State
from mmserve.workers.zygote import Exit, Process, Zygote

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
        batches: batches served.
        on_replies: called for each finished batch with its message and payload.
    """

    def __init__(self, model: str, number: int, id: str, gpu_id: int | None) -> None:
        self.model, self.number, self.id, self.gpu_id = model, number, id, gpu_id
        self.life = Life()
        self.start, self.start_reason = "fork", ""
        self.memory_bytes = 0
        self.batches = 0
        self.load_s = 0.0
        self.ready_at = 0.0
        self.on_replies: Callable[[Replies, memoryview], None] | None = None
        self.on_metrics: Callable[[list[str]], None] | None = None
        self.process: Process | None = None
        self.pumps: list[OutputPump] = []  # of its stdout and stderr
        self._wire: _Wire | None = None
        self._loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._killed_for = ""
        self.in_flight = 0  # batches sent and not answered
        self.outgrown = asyncio.Event()  # it has served or grown enough: replace it
        self._max_batches: int | None = None
        self._memory_limit: int | None = None
        self._became_idle: asyncio.Future[None] | None = None

    # Batches

    def set_limits(self, max_batches: int | None, memory_limit: int | None) -> None:
        """After so many batches, or above so many resident bytes, it is `outgrown`."""
        self._max_batches, self._memory_limit = max_batches, memory_limit

    def began(self) -> None:
        self.in_flight += 1

    def finished(self) -> None:
        self.in_flight -= 1
        if not self.in_flight and self._became_idle is not None:
            if not self._became_idle.done():
                self._became_idle.set_result(None)
            self._became_idle = None

    async def idle(self) -> None:
        """Returns once it has no batch, or has ended."""
        if self.in_flight and self.state is not State.STOPPED:
            if self._became_idle is None:
                self._became_idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._became_idle)

    @property
    def state(self) -> State:
        return self.life.state

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    # Life

    async def attach(self, process: Process, wire: socket.socket) -> None:
        """The process is there; its end of `wire` is with it."""
        self.process = process
        loop = asyncio.get_running_loop()
        wire.setblocking(False)
        _, self._wire = await loop.create_unix_connection(lambda: _Wire(self._heard), sock=wire)
        self.life.move(Event.CONNECTED)

    async def load(self, order: Load, timeout_s: float) -> Loaded:
        """Has the process load its model.

        Raises:
            WorkersFailed: the handler refused, the process died, or it took too long.
        """
        assert self.process is not None
        self.send(order)
        exited = self.process.exited
        try:
            async with asyncio.timeout(timeout_s):
                await _first_of(self._loaded, exited)
        except TimeoutError:
            raise WorkersFailed(
                f"the model took longer than {timeout_s:g} s to load; "
                "load_timeout_seconds sets the limit"
            ) from None
        if not self._loaded.done():
            await self._hear_last_words()
        if self._loaded.done():
            loaded = self._loaded.result()
            self.life.move(Event.LOADED)
            self.load_s, self.ready_at = loaded.load_s, time.monotonic()
            return loaded
        how = exited.result()
        raise WorkersFailed(
            f"the worker ended while it loaded the model. {how}",
            out_of_memory=how.was_out_of_memory or how.code == -signal.SIGKILL,
        )

    def ask_to_stop(self) -> None:
        """No new batch from now on; what runs may finish."""
        if self.state is not State.STOPPED:
            self.life.move(Event.STOP_ASKED)

    async def stop(self, zygote: Zygote, *, grace_s: float = STOP_GRACE_S) -> None:
        """End-of-file, then SIGKILL to its group. Returns when the process is reaped."""
        if self._wire is not None:
            self._wire.close()
        if self.process is None:
            self._stopped()
            return
        process = self.process
        try:
            async with asyncio.timeout(grace_s):
                await asyncio.shield(process.exited)
        except TimeoutError:
            await self.kill(zygote)
            await process.exited
        self._stopped()

    async def kill(self, zygote: Zygote, why: str = "") -> None:
        """SIGKILL to its process group, now."""
        self._killed_for = self._killed_for or why
        if self.process is not None:
            await zygote.signal_group(self.process, signal.SIGKILL)

    async def ended(self, zygote: Zygote) -> Exit:
        """Waits for the process's end."""
        assert self.process is not None and self._wire is not None
        exited = self.process.exited
        await _first_of(exited, self._wire.lost)
        if not exited.done():
            # End-of-file is a hint: its process ends now, or is of no use to anybody.
            await asyncio.wait({exited}, timeout=STOP_GRACE_S)
            if not exited.done():
                await self.kill(zygote, "It closed its connection to the server.")
            await asyncio.shield(exited)
        await self._hear_last_words()
        self._stopped()
        return exited.result()

    async def _hear_last_words(self) -> None:
        """What the process said before its end may arrive after the news of it."""
        if self._wire is not None and not self._wire.lost.done():
            await asyncio.wait({self._wire.lost}, timeout=LAST_WORDS_S)

    def end_text(self, how: Exit) -> str:
        """Why it ended, for the client whose request it had."""
        return self._killed_for or str(how)

    @property
    def was_killed_by_us(self) -> bool:
        return bool(self._killed_for)

    def _stopped(self) -> None:
        if self._wire is not None:
            self._wire.close()
        while self.pumps:  # a process that it left behind may hold the other ends
            self.pumps.pop().close()
        if self.state is not State.STOPPED:
            self.life.move(Event.EXITED)
        if not self._loaded.done():
            self._loaded.cancel()
        if self._became_idle is not None and not self._became_idle.done():
            self._became_idle.set_result(None)

    # The wire

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

    def _heard(self, message: msgspec.Struct, payload: memoryview) -> None:
        if isinstance(message, Replies):
            self.batches += 1
            if message.memory_bytes:
                self.memory_bytes = message.memory_bytes
                if self._memory_limit is not None and self.memory_bytes > self._memory_limit:
                    self.outgrown.set()
            if self.batches == self._max_batches:
                self.outgrown.set()
            if self.on_replies is not None:
                self.on_replies(message, payload)
            if message.metrics and self.on_metrics is not None:
                self.on_metrics(message.metrics)
        elif isinstance(message, Loaded):
            if not self._loaded.done():
                self._loaded.set_result(message)
            if message.metrics and self.on_metrics is not None:
                self.on_metrics(message.metrics)
        elif isinstance(message, LoadFailed):
            if message.trace:
                log.warning("model failed to load", extra={"trace": message.trace})
            if not self._loaded.done():
                self._loaded.set_exception(
                    WorkersFailed(message.cause, out_of_memory=message.out_of_memory)
                )
                self._loaded.exception()  # retrieved: nobody may be waiting any more
        elif isinstance(message, Hello):
            pass


class _Wire(asyncio.Protocol):
    """The front's end of a worker's socket pair. Its end-of-file is a hint only.

    What the socket does not take at once is kept: it is bounded by two batches of requests.
    """

    def __init__(self, heard: Callable[[msgspec.Struct, memoryview], None]) -> None:
        self._heard = heard
        self._decoder: Decoder[ToFront] = Decoder(ToFront)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._unsent: list[Any] = []
        self._is_flush_due = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        try:
            for message, payload in self._decoder.feed(data):
                self._heard(message, payload)
        except (WireError, msgspec.DecodeError) as error:
            log.error("a worker's message makes no sense", extra={"cause": str(error)})
            self.close()

    def send(
        self, message: msgspec.Struct, parts: Sequence[bytes | memoryview], *, soon: bool
    ) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._unsent += encode(message, parts)
        if not soon:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_now_due)

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
        if self._transport is not None:
            self._transport.close()


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    """Returns when one of them is done; cancels none."""
    await asyncio.wait(set(futures), return_when=asyncio.FIRST_COMPLETED)


def pipe_for_output() -> tuple[int, int]:
    """A pipe for a worker's stdout or stderr: our non-blocking read end, its write end."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    return read, write
