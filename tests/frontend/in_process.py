"""A client that drives an application in process: no socket, the edge's part left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeAlias

from mmserve.config.settings import Settings
from mmserve.frontend.api import Api
from mmserve.frontend.head import split_target
from mmserve.frontend.http import Application, Exchange, Request, Response
from tests.frontend.fake_models import FakeModels

#: Headers by name, or as pairs where a name comes twice.
Fields: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]

JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class RecordingExchange(Exchange):
    """Keeps the one reply it gets."""

    __slots__ = ("response",)

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.response: Response | None = None

    def reply(self, response: Response) -> None:
        assert self.response is None, "a request has one reply"
        self.response = response


class Reply:
    """A response, as tests like to read it."""

    def __init__(self, response: Response) -> None:
        self.status, self.reason = response.status, response.reason
        self.body = bytes(response.body)
        self.headers = {name.lower(): value for name, value in response.headers}

    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)

    @property
    def told(self) -> tuple[int, str, str]:
        """Status, type and message of an error; its shape is checked."""
        error = self.json()
        assert error["code"] == self.status
        return self.status, error["type"], error["message"]


def request(method: str, target: str, body: bytes = b"", headers: Fields = ()) -> Request:
    path, query = split_target(target)
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    fields = [("Host", "localhost:8081"), *pairs]
    return Request(method, target, path, query, fields, body, id="the-id")


class House:
    """An API over models in memory, and the three applications to talk to."""

    def __init__(self, models: FakeModels | None = None, **settings: Any) -> None:
        self.models = models or FakeModels()
        self._spawned: list[Coroutine[Any, Any, None]] = []
        self.api = Api(Settings(**settings), self.models, self._spawned.append)

    def infer(self, method: str, target: str, *args: Any, **more: Any) -> Reply:
        return self.send(self.api.inference, method, target, *args, **more)

    def manage(self, method: str, target: str, *args: Any, **more: Any) -> Reply:
        return self.send(self.api.management, method, target, *args, **more)

    def share(self, method: str, target: str, *args: Any, **more: Any) -> Reply:
        return self.send(self.api.shared, method, target, *args, **more)

    def send(
        self,
        application: Application,
        method: str,
        target: str,
        body: bytes = b"",
        headers: Fields = (),
    ) -> Reply:
        """The reply, after what the request started has run to its end."""
        exchange = RecordingExchange(request(method, target, body, headers))
        application(exchange)
        while self._spawned:
            asyncio.run(self._spawned.pop())
        assert exchange.response is not None, "a request has a reply"
        return Reply(exchange.response)
