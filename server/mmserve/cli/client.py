"""Talks to a running server: one request, one reply, over TCP, TLS or a unix socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from mmserve.config.addresses import Address
from mmserve.logs.escape import escaped


class Unreachable(Exception):
    """No reply came; the message says from where and why."""


class Refused(Exception):
    """The server replied with an error."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(escaped(_problem(status, body)))
        self.status = status


class Workers(NamedTuple):
    """How many workers of a model can work, and how many it is to have."""

    ready: int
    wanted: int


class Reply:
    """A reply below 400.

    Attributes:
        status: HTTP status.
        content_type: as sent, "" where there is none.
        body: bytes.
    """

    __slots__ = ("body", "content_type", "status")

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        self.status, self.content_type, self.body = status, content_type, body


class Client:
    """One server.

    Args:
        address: where it listens; a wildcard host stands for this machine.
        token: sent as a bearer token.
        timeout_s: for each step of a request; None waits for ever.
        ca_file: certificates to trust, PEM; None for those of the system.
        is_insecure: accept any certificate, for servers with one they made themselves.

    Raises:
        OSError: `ca_file` cannot be read, or holds no certificate.
    """

    def __init__(
        self,
        address: Address,
        *,
        token: str | None = None,
        timeout_s: float | None = None,
        ca_file: str | None = None,
        is_insecure: bool = False,
    ) -> None:
        self.address = address
        self._token, self._timeout_s = token, timeout_s
        self._tls = _trust(ca_file, is_insecure=is_insecure) if address.is_tls else None

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One request on a connection of its own.

        Raises:
            Unreachable: no complete reply came.
            Refused: the reply has a status of 400 or above.
        """
        target = path + (f"?{urlencode(query)}" if query else "")
        sent = dict(headers or {})
        if self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.request(method, target, body=body, headers=sent)
                response = connection.getresponse()
                data = response.read()
        except TimeoutError:
            raise Unreachable(
                f"{self.address.url} did not answer within {self._timeout_s:g} s; "
                "--timeout gives it longer"
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise Unreachable(
                f"the certificate of {self.address.url} is not trusted ({error.verify_message}); "
                "--ca-file names one to trust, --insecure takes any"
            ) from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # last: a host name
            reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
            raise Unreachable(
                f"no server answers at {self.address.url}: {reason}; --address names another place"
            ) from None
        if response.status >= 400:
            raise Refused(response.status, data)
        return Reply(response.status, response.headers.get("content-type", ""), data)

    def _connection(self) -> http.client.HTTPConnection:
        address = self.address
        if address.is_unix:
            return _UnixConnection(address.path, self._timeout_s)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
        if self._tls is None:
            return http.client.HTTPConnection(host, address.port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(
            host, address.port, timeout=self._timeout_s, context=self._tls
        )

    # Management

    def pages(self) -> Iterator[list[tuple[str, str]]]:
        """(name, url) of every model, up to 100 at a time."""
        token: str | None = None
        while True:
            query: dict[str, object] = {"limit": 100}
            if token is not None:
                query["next_page_token"] = token
            page = self._json("GET", "/models", query=query)
            yield [
                (str(model["modelName"]), str(model["modelUrl"]))
                for model in page.get("models", [])
            ]
            if not (token := page.get("nextPageToken")):
                return

    def only_name_of(self, url: str) -> str | None:
        """The name under which an archive is registered; None where there are several, or none."""
        names = [name for page in self.pages() for name, its_url in page if its_url == url]
        return names[0] if len(names) == 1 else None

    def workers(self, name: str) -> Workers | None:
        """None for a model that has gone, or is described in no way that we know."""
        try:
            model = self._json("GET", f"/models/{_quoted(name)}")
            ready = sum(worker["status"] == "READY" for worker in model["workers"])
            return Workers(ready, int(model["minWorkers"]))
        except Refused as refused:
            if refused.status != http.client.NOT_FOUND:
                raise
        except (KeyError, TypeError, ValueError):
            pass
        return None

    def describe(self, name: str) -> Reply:
        return self.send("GET", f"/models/{_quoted(name)}")

    def load(self, asked: Mapping[str, object]) -> Reply:
        """Registers a model; `asked` has the fields of the registration, times in seconds."""
        return self.send(
            "POST",
            "/models",
            body=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json"},
        )

    def unload(self, name: str) -> Reply:
        return self.send("DELETE", f"/models/{_quoted(name)}")

    def scale(self, name: str, asked: Mapping[str, object]) -> Reply:
        return self.send("PUT", f"/models/{_quoted(name)}", query=asked)

    # Inference

    def invoke(
        self, name: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        path = f"/predictions/{_quoted(name)}"
        return self.send("POST", path, body=body, headers=headers)

    def _json(
        self, method: str, path: str, *, query: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        reply = self.send(method, path, query=query)
        try:
            found = json.loads(reply.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Unreachable(f"what answers at {self.address.url} is no model server")
        return found


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _trust(ca_file: str | None, *, is_insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    if is_insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _quoted(name: str) -> str:
    return quote(name, safe="", errors="surrogateescape")


def read_token(path: str) -> str:
    """The token in a file, blanks around it off. Raises OSError, UnicodeDecodeError."""
    return Path(path).read_text("ascii").strip()


def _problem(status: int, body: bytes) -> str:
    try:
        said = json.loads(body)
        return f"{status} {said['type']}: {said['message']}"
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace").strip()[:2000]
        return f"{status} {http.client.responses.get(status, '')}{': ' if text else ''}{text}"
