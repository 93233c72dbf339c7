"""One batch through the handler: rows in, outcomes out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from mmserve.errors import ResponseTooLarge
from mmserve.runtime.context import Context, RequestProcessor, checked_status
from mmserve.runtime.failures import (
    BadInput,
    BadReply,
    is_out_of_memory,
    prediction_exception,
    sendable,
    trace_of,
)
from mmserve.runtime.inputs import row
from mmserve.runtime.metrics_store import hostname
from mmserve.runtime.results import NOT_A_LIST, WRONG_LENGTH, body_of
from mmserve.wire.framing import Bytes, cut
from mmserve.wire.messages import Item, Outcome, Predict, Replies

FAILED = "Prediction failed"
NO_MEMORY = "Out of resources"

#: A line for the log.
Say = Callable[[str], None]

_ESCAPED = str.maketrans(dict.fromkeys("|,#:\r\n\t", "_"))


class Predictor:
    """Answers the batches of one model.

    Args:
        say: gets what the log should know of a batch that failed.
        decode: `decode_input_request`.
        max_response_size: bytes of one body at most.
    """

    def __init__(
        self,
        entry: Callable[[Any, Context], Any],
        context: Context,
        say: Say,
        *,
        decode: bool,
        max_response_size: int,
    ) -> None:
        self._entry, self._context, self._say = entry, context, say
        self._decode, self._max_response_size = decode, max_response_size
        model = context.model_name.translate(_ESCAPED)
        self._dimensions = f"|#ModelName:{model},Level:Model|#hostname:{hostname()},requestID:"

    def answer(self, batch: Predict, payload: Bytes) -> tuple[Replies, list[Bytes]]:
        """The reply to a batch, and its payload.

        A request whose body is not what it says to be gets its own error and never reaches the
        handler; an error of the handler is that of all the others.

        Raises:
            SystemExit, KeyboardInterrupt: the handler wants the process to end.
            WireError: the batch does not fit its payload.
        """
        rows, good, refused = self._rows(batch.items, payload)
        metrics: list[str] = []
        bodies: list[Bytes] = []
        outcomes: list[Outcome] = []
        handler_s = 0.0
        if rows:
            processors = self._context.begin(good)
            outcomes, handler_s = self._predict(rows, processors, bodies, metrics)
        for index, message in refused:  # in rising order, so that each finds its place
            outcomes.insert(index, Outcome(400, 0, error=message, is_bad_request=True))
        return Replies(batch.batch_id, outcomes, metrics, handler_s), bodies

    def _rows(
        self, items: list[Item], payload: Bytes
    ) -> tuple[list[dict[str, Any]], list[Item], list[tuple[int, str]]]:
        if len(items) == 1 and len(items[0].parameters) == 1:
            parts: Sequence[Bytes] = (payload,)  # as it is: it may become the value itself
        else:
            parts = cut(payload, [sum([p.size for p in item.parameters]) for item in items])
        rows, good, refused = [], [], []
        for index, (item, part) in enumerate(zip(items, parts, strict=True)):
            try:
                rows.append(row(item, part, decode=self._decode))
                good.append(item)
            except BadInput as bad:
                refused.append((index, str(bad)))
        return rows, good, refused

    def _predict(
        self,
        rows: list[dict[str, Any]],
        processors: list[RequestProcessor],
        bodies: list[Bytes],
        metrics: list[str],
    ) -> tuple[list[Outcome], float]:
        context, count = self._context, len(rows)
        request_ids = context.request_ids or {}
        began = time.perf_counter()
        try:
            results = self._entry(rows, context)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # CancelledError, say: no reason to end the process
            handler_s = time.perf_counter() - began
            return self._failed(error, count, metrics), handler_s
        handler_s = time.perf_counter() - began
        self._collect(metrics)
        if not isinstance(results, list):
            self._say(
                f"The handler returned {type(results).__name__}; a list with one element for each "
                "request is expected."
            )
            return _all(count, 503, NOT_A_LIST), handler_s
        if len(results) != count:
            self._say(f"The handler returned {len(results)} results for {count} requests.")
            return _all(count, 503, WRONG_LENGTH), handler_s
        outcomes = [
            self._outcome(result, processor, bodies)
            for result, processor in zip(results, processors, strict=True)
        ]
        ids = request_ids.get(0) if count == 1 else ",".join(request_ids.values())
        metrics.append(
            f"PredictionTime.Milliseconds:{round(handler_s * 1e3, 2)}{self._dimensions}{ids},"
            f"timestamp:{int(time.time())}"
        )
        return outcomes, handler_s

    def _outcome(self, result: Any, processor: RequestProcessor, bodies: list[Bytes]) -> Outcome:
        """Of one request; what it cannot send concerns no other."""
        try:
            status, phrase, headers = processor.response()
            body, is_json = body_of(result)
        except BadReply as bad:
            self._say(f"{bad} The result is of type {type(result).__name__}.")
            return Outcome(503, 0, error=str(bad))
        except MemoryError:
            self._say("There was no memory to encode a result.")
            return Outcome(507, 0, error=NO_MEMORY)
        size = len(body)
        if size > self._max_response_size:
            return Outcome(500, 0, error=str(ResponseTooLarge(size, self._max_response_size)))
        if size:
            bodies.append(body)
        return Outcome(status, size, phrase, headers, None, is_json)

    def _failed(self, error: BaseException, count: int, metrics: list[str]) -> list[Outcome]:
        self._say("Invoking custom service failed.\n" + trace_of(error))
        self._collect(metrics)
        chosen = prediction_exception(error)
        if chosen is not None:
            message, code = chosen
            try:
                return _all(count, checked_status(code), sendable(str(message)))
            except Exception:  # no status, or a message that has no text
                return _all(count, 503, FAILED)
        if is_out_of_memory(error):
            error.__traceback__ = None  # its frames hold what filled the memory
            gc.collect()
            return _all(count, 507, NO_MEMORY)
        return _all(count, 503, FAILED)

    def _collect(self, metrics: list[str]) -> None:
        store = self._context.take_metrics()
        if store is not None and store.store:
            lines, junk = store.lines(time.time())
            metrics += lines
            if junk:
                self._say(f"Metrics without a number are left out: {', '.join(junk)!r:.200}.")


def _all(count: int, status: int, message: str) -> list[Outcome]:
    return [Outcome(status, 0, error=message) for _ in range(count)]
