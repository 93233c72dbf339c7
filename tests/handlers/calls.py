"""A handler's context, without a server: it remembers what the handler set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Context:
    """Keeps the contract that `mmserve_handlers.contract.Context` names."""

    def __init__(self, model_dir: Path) -> None:
        self.model_name = "m"
        self.system_properties: dict[str, Any] = {"model_dir": str(model_dir), "gpu_id": None}
        self.content_type: str | None = None
        #: Of every request; a form's field has a dict, as from the server.
        self.headers: dict[str, Any] = {}
        self.content_types: dict[int, str] = {}
        self.statuses: dict[int, int] = {}

    def get_request_header(self, idx: int, key: str) -> Any:
        return self.content_type if key.lower() == "content-type" else self.headers.get(key)

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.content_types[idx] = value

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self.statuses[idx] = code


def answers(bodies: list[bytes] | None) -> list[Any]:
    assert bodies is not None
    return [json.loads(body) for body in bodies]
