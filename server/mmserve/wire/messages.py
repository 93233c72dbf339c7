"""What the front and a worker say to each other: msgspec structs, sent as MessagePack.

A message may have a payload, raw bytes that follow it in the frame (`framing.py`). Sizes in a
message cut the payload into its parts, in order.
"""

from __future__ import annotations

import msgspec


class Parameter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One entry of a request's dict.

    Attributes:
        name: key in the handler's dict.
        size: bytes of the payload that are its value.
        content_type: the part's own media type; None for a plain form field or query parameter,
            which is handed on as a bytearray. For the `body` key it is the request's
            Content-Type, "" where the request had none.
    """

    name: str
    size: int
    content_type: str | None = None


class Item(msgspec.Struct, array_like=True, gc=False):
    """One request of a batch."""

    request_id: str
    headers: list[tuple[str, str]]
    parameters: list[Parameter]


# front → worker


class Load(msgspec.Struct, tag="load", array_like=True):
    """The first message to a worker: which model it is. Answered by Loaded or LoadFailed.

    Attributes:
        model_name: registered name.
        model_dir: absolute directory of the model.
        handler: handler text as in the manifest.
        batch_size: requests in a batch at most.
        gpu_id: device index, or None.
        manifest: text of MAR-INF/MANIFEST.json, "" where there is none.
        decode_input: `decode_input_request` of the settings.
        max_response_size: bytes of one response's body at most.
        properties: more entries of `context.system_properties`.
        busy_poll_s: how long to stay awake for the next batch after a quick one.
    """

    model_name: str
    model_dir: str
    handler: str
    batch_size: int
    gpu_id: int | None
    manifest: str
    decode_input: bool
    max_response_size: int
    properties: dict[str, str] = {}
    busy_poll_s: float = 0.0


class Predict(msgspec.Struct, tag="predict", array_like=True, gc=False):
    """One batch. Payload: the values of all parameters of all items. Answered by Replies."""

    batch_id: int
    items: list[Item]


# worker → front


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """A worker is there."""

    pid: int
    start: str  # "fork", "fresh" or "template"


class Loaded(msgspec.Struct, tag="loaded", array_like=True):
    """The model is loaded.

    Attributes:
        load_s: seconds it took.
        metrics: finished metric lines (`[METRICS]` taken off) that the load produced.
        can_fork: a template may fork workers from this process.
        why_not: the reason where it may not.
    """

    load_s: float
    metrics: list[str]
    can_fork: bool = True
    why_not: str = ""


class LoadFailed(msgspec.Struct, tag="load_failed", array_like=True):
    """The model cannot be loaded; the worker ends after this message.

    Attributes:
        cause: one line, the exception's type and text.
        out_of_memory: it was a MemoryError or an allocator's own error.
        trace: the traceback, for the log.
    """

    cause: str
    out_of_memory: bool
    trace: str


class Outcome(msgspec.Struct, array_like=True, gc=False):
    """Of one request of a batch.

    Attributes:
        status: HTTP status.
        size: bytes of the payload that are its body.
        phrase: reason phrase, None for the standard one.
        headers: (name, value) that the handler set.
        error: None for the handler's own response. Otherwise the message of an error response
            that the front makes.
        is_json: the body is JSON that the worker encoded.
        is_bad_request: `error` tells of the client's mistake (a body that is not what its type
            says), not of a handler that failed.
    """

    status: int
    size: int
    phrase: str | None = None
    headers: list[tuple[str, str]] = []
    error: str | None = None
    is_json: bool = False
    is_bad_request: bool = False


class Replies(msgspec.Struct, tag="replies", array_like=True, gc=False):
    """A batch is done.

    Attributes:
        batch_id: of the Predict.
        outcomes: one per item, in order.
        metrics: finished metric lines for model_metrics.log.
        handler_s: seconds in the handler.
        memory_bytes: resident memory, 0 when it was not read this time.
    """

    batch_id: int
    outcomes: list[Outcome]
    metrics: list[str]
    handler_s: float
    memory_bytes: int = 0


ToWorker = Load | Predict
ToFront = Hello | Loaded | LoadFailed | Replies
