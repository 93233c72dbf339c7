"""Requests whose replies are compared, and what goes with them. Quiet: only values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Headers = tuple[tuple[str, str], ...]


class Exchange(NamedTuple):
    """One request, whose reply is compared.

    Attributes:
        name: unique within its script.
        path: `{files}` stands for the URL of a server of files.
        api: which listener gets it.
        raw: the whole request, where it is not what a client library would send.
        times: how many are sent at the same moment; their replies are compared in the order of
            status and body.
        limit_s: within which a reply must come.
    """

    name: str
    method: str
    path: str
    body: bytes = b""
    headers: Headers = ()
    api: str = "inference"
    raw: bytes | None = None
    times: int = 1
    limit_s: float = 20.0


class Settle(NamedTuple):
    """Waits until `POST /predictions/{model}` with `body` is 200. Not compared."""

    model: str
    body: bytes = b""


class Clear(NamedTuple):
    """Unregisters a model that one server has and the other may not have. Not compared."""

    model: str


class Gone(NamedTuple):
    """Waits until a model that could not be loaded is unknown. Not compared."""

    model: str


Step = Exchange | Settle | Clear | Gone


class Script(NamedTuple):
    """Steps in order, on servers whose state is what the earlier scripts of the setting left."""

    name: str
    steps: tuple[Step, ...]


class Setting(NamedTuple):
    """How a pair of servers is started, and what they are asked.

    Attributes:
        properties: of both, besides their addresses.
        models: words of `--models`.
        one_port: one listener has both APIs.
    """

    name: str
    scripts: tuple[Script, ...]
    properties: Mapping[str, object] = {}
    models: tuple[str, ...] = ()
    one_port: bool = False


METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
JSON = (("Content-Type", "application/json"),)
TEXT = (("Content-Type", "text/plain"),)


def typed(content_type: str) -> Headers:
    return (("Content-Type", content_type),)
