"""What a handler is told of its model and its requests, and what it says beside its results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmserve import MMS_VERSION
from mmserve.runtime.failures import BadReply, sendable
from mmserve.runtime.metrics_store import MetricsStore
from mmserve.wire.messages import Item

SERVER_NAME = "MMS"
_CONTENT_TYPE = "content-type"

#: 1xx is an interim reply: the client would wait for another one.
_STATUSES = range(200, 1000)
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_NOT_IN_VALUE = re.compile(r"[\r\n\0\ud800-\udfff]")


class RequestProcessor:
    """Headers of one request, and headers and status of its response.

    Args:
        request_header: header name → value, and parameter name → {"content-type": …}; made from
            the request when somebody asks.
    """

    def __init__(self, request_header: Mapping[str, Any] | None = None) -> None:
        self._request_header = request_header
        self._item: Item | None = None
        self._status_code: Any = 200
        self._reason_phrase: Any = None
        self._response_header: dict[Any, Any] = {}

    @classmethod
    def of(cls, item: Item) -> RequestProcessor:
        processor = cls()
        processor._item = item
        return processor

    def get_request_property(self, key: str) -> Any:
        """A header's value, whatever its letter case (the exact one first); None if unknown.

        For the name of a parameter it is {"content-type": …}, unless a header has that name.
        """
        properties = self.get_request_properties()
        value = properties.get(key)
        if value is None and isinstance(key, str):
            wanted = key.lower()
            for name, other in properties.items():
                if name.lower() == wanted and isinstance(other, str):
                    value = other  # the last one wins
        return value

    def get_request_properties(self) -> Mapping[str, Any]:
        """All of them, in the letter case of the client."""
        if self._request_header is None:
            properties: dict[str, Any] = {}
            if self._item is not None:
                for parameter in self._item.parameters:
                    properties[parameter.name] = {_CONTENT_TYPE: parameter.content_type or ""}
                properties.update(self._item.headers)
            self._request_header = properties
        return self._request_header

    def report_status(self, code: Any, reason_phrase: Any = None) -> None:
        self._status_code, self._reason_phrase = code, reason_phrase

    def add_response_property(self, key: Any, value: Any) -> None:
        self._response_header[key] = value

    def get_response_headers(self) -> dict[Any, Any]:
        return self._response_header

    def get_response_header(self, key: Any) -> Any:
        return self._response_header.get(key)

    def get_response_status_code(self) -> Any:
        return self._status_code

    def get_response_status_phrase(self) -> Any:
        return self._reason_phrase

    def response(self) -> tuple[int, str | None, list[tuple[str, str]]]:
        """Status, reason phrase and headers as they can be sent.

        Raises:
            BadReply: one of them cannot.
        """
        status = checked_status(self._status_code)
        phrase = self._reason_phrase or None
        if phrase is not None:
            if not isinstance(phrase, str):
                raise BadReply(f"The handler's reason phrase is no text: {_short(phrase)}.")
            phrase = sendable(" ".join(phrase.splitlines()).replace("\0", " "))
        headers = self._response_header
        return status, phrase, _checked_headers(headers) if headers else []


def checked_status(status: Any) -> int:
    """The status as a whole number. Raises BadReply where no response can have it."""
    if type(status) is not int:
        try:
            status = None if isinstance(status, bool) else status.__index__()
        except Exception:
            status = None
    if status not in _STATUSES:
        raise BadReply("The handler set a response status that is no whole number from 200 to 999.")
    return int(status)


def _checked_headers(headers: Mapping[Any, Any]) -> list[tuple[str, str]]:
    # `Content-Type` and `content-type` are one header; the one that was set last is sent.
    last: dict[str, tuple[str, str]] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise BadReply(f"The handler set a header whose name is none: {_short(name)}.")
        if not isinstance(value, str):
            raise BadReply(
                f"The handler set the header {name} to {_short(value)}; a header's value is text."
            )
        if _NOT_IN_VALUE.search(value):
            raise BadReply(
                f"The handler set the header {name} to a text with a line break, a NUL or a lone "
                "surrogate."
            )
        last[name.lower()] = (name, value)
    return list(last.values())


def _short(value: object) -> str:
    """Which value it was, as far as a client may know."""
    return f"{value!r}" if isinstance(value, int | float) else f"a value of {type(value).__name__}"


class Context:
    """One object per worker; what concerns requests is renewed for each batch.

    Attributes:
        model_name: registered name.
        manifest: `MAR-INF/MANIFEST.json` as it is, or None.
        request_ids: index in the batch → id; None before the first request.
        metrics_type: of `metrics`.
    """

    metrics_type = MetricsStore

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: Any,
        batch_size: int,
        gpu: int | None,
        mms_version: str = MMS_VERSION,
    ) -> None:
        self.model_name, self.manifest = model_name, manifest
        self._system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": SERVER_NAME,
            "server_version": mms_version,
        }
        self.request_ids: dict[int, str] | None = None
        self._request_processor: list[RequestProcessor] | None = None
        self._metrics: MetricsStore | None = None

    def begin(self, items: Sequence[Item]) -> list[RequestProcessor]:
        """A batch begins: what the last one said is forgotten."""
        self.request_ids = {index: item.request_id for index, item in enumerate(items)}
        processors = [RequestProcessor.of(item) for item in items]
        self._request_processor = processors
        self._metrics = None
        return processors

    @property
    def system_properties(self) -> dict[str, Any]:
        return self._system_properties

    @property
    def request_processor(self) -> list[RequestProcessor] | None:
        return self._request_processor

    @request_processor.setter
    def request_processor(self, processors: list[RequestProcessor]) -> None:
        self._request_processor = processors

    @property
    def metrics(self) -> MetricsStore:
        """The metrics of this batch, or of the load."""
        if self._metrics is None:
            self._metrics = self.metrics_type(self.request_ids or {}, self.model_name)
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: MetricsStore) -> None:
        self._metrics = metrics

    def take_metrics(self) -> MetricsStore | None:
        """The metrics so far, where the handler asked for any; a later call finds new ones."""
        metrics, self._metrics = self._metrics, None
        return metrics

    def get_request_id(self, idx: int = 0) -> str | None:
        return (self.request_ids or {}).get(idx)

    def get_request_header(self, idx: int | str, key: str) -> Any:
        return self._of(idx).get_request_property(key)

    def get_all_request_header(self, idx: int | str) -> Mapping[str, Any]:
        return self._of(idx).get_request_properties()

    def set_response_content_type(self, idx: int | str, value: str) -> None:
        self.set_response_header(idx, _CONTENT_TYPE, value)

    def get_response_content_type(self, idx: int | str) -> Any:
        return self._of(idx).get_response_header(_CONTENT_TYPE)

    def set_response_header(self, idx: int | str, key: str, value: str) -> None:
        self._of(idx).add_response_property(key, value)

    def get_response_headers(self, idx: int | str) -> dict[Any, Any]:
        return self._of(idx).get_response_headers()

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int | str = 0) -> None:
        if self._request_processor is not None:  # while the model loads it is no mistake
            self._of(idx).report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        for processor in self._request_processor or ():
            processor.report_status(code, phrase)

    def get_response_status(self, idx: int | str) -> tuple[Any, Any]:
        processor = self._of(idx)
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def _of(self, idx: int | str) -> RequestProcessor:
        """The request at an index of the batch, or (old releases had it so) with an id."""
        if isinstance(idx, str):
            for index, request_id in (self.request_ids or {}).items():
                if request_id == idx:
                    idx = index
        if self._request_processor is None:
            raise RuntimeError("There is no request while the model loads.")
        return self._request_processor[idx]  # type: ignore[index]  # a str has no such request
