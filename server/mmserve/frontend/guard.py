"""Who may use management: not a page of somebody else in a browser, and who has the token.

Registering a URL runs its code, so that two tricks of web pages matter. A page may send requests
across origins (it cannot read the replies, but it need not): its `Origin` gives it away. Or it may
bind its own host name to 127.0.0.1 (DNS rebinding): then `Host` does.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

from mmserve.config.addresses import parse as parse_address
from mmserve.errors import ConfigurationError, Forbidden, Unauthorized
from mmserve.frontend.http import Request

_log = logging.getLogger(__name__)

_DEFAULT_PORTS = {"http": "80", "https": "443"}


# Quiet: texts in, answers out


def is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address without brackets, can only be this machine."""
    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    for family, is_inside in (
        (socket.AF_INET, lambda packed: packed[0] == 127),
        (socket.AF_INET6, _is_loopback_v6),
    ):
        try:
            return is_inside(socket.inet_pton(family, host))
        except (OSError, ValueError):  # ValueError: a NUL in the text
            continue
    return False


def _is_loopback_v6(packed: bytes) -> bool:
    mapped = packed.startswith(b"\0" * 10 + b"\xff\xff")
    return packed == b"\0" * 15 + b"\1" or (mapped and packed[12] == 127)


def is_bound_to_loopback(address: str) -> bool:
    """Whether a listener at this `management_address` is reachable by TCP from here only.

    False for a unix socket too, which no browser reaches.

    Raises:
        ConfigurationError: it is no address.
    """
    where = parse_address(address, "management_address")
    return where.is_loopback and not where.is_unix


def split_port(authority: str) -> tuple[str, str]:
    """Host, without brackets, and port ("" where there is none)."""
    if authority.startswith("["):
        host, _, rest = authority[1:].partition("]")
        return host, rest.removeprefix(":")
    host, _, port = authority.partition(":")
    return host, port


def is_same_origin(origin: str, host: str) -> bool:
    """Whether an `Origin` is the server that the request's `Host` names.

    The scheme is not compared: behind a proxy that ends TLS it is not ours to know.
    """
    scheme, separator, authority = origin.lower().partition("://")
    if not separator or not host:
        return False
    default = _DEFAULT_PORTS.get(scheme, "")
    ours, theirs = split_port(host.lower()), split_port(authority)
    return (ours[0], ours[1] or default) == (theirs[0], theirs[1] or default)


def is_allowed_origin(origin: str, allowed: str | None) -> bool:
    """Whether `cors_allowed_origin` lets this `Origin` in."""
    if not allowed:
        return False
    allowed = allowed.strip()
    return allowed == "*" or allowed.lower().rstrip("/") == origin.lower()


def bearer_token(authorization: str | None) -> str | None:
    """The token of an `Authorization: Bearer` header."""
    if authorization is None:
        return None
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


# Loud


class TokenFile:
    """The secret in `management_token_file`, read again when the file changes.

    Raises:
        ConfigurationError: it cannot be read, or is empty, when the server starts.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int, int] | None = None
        self._token = b""
        try:
            token = self.token()
        except OSError as error:
            raise ConfigurationError(
                f"management_token_file={path} cannot be read: {error.strerror}."
            ) from None
        if not token:
            raise ConfigurationError(f"management_token_file={path} is empty.")

    def token(self) -> bytes:
        """The secret, without white space around it. Raises OSError."""
        stat = self._path.stat()
        seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if seen != self._seen:
            self._token = self._path.read_bytes().strip()
            self._seen = seen
        return self._token

    def check(self, authorization: str | None) -> None:
        """Raises Unauthorized unless the header carries the secret."""
        import hmac

        given = bearer_token(authorization)
        if given is None:
            raise Unauthorized(
                "Management needs a token; send it as Authorization: Bearer …, "
                "with the content of the server's management_token_file."
            )
        try:
            token = self.token()
        except OSError as error:
            _log.error(
                "management token unreadable",
                extra={"path": str(self._path), "error": error.strerror},
            )
            token = b""
        # In constant time; a file that is empty or gone lets nobody in.
        if not hmac.compare_digest(given.encode("utf-8", "replace"), token) or not token:
            raise Unauthorized("The management token is wrong.")


class Guard:
    """Stands before every management route.

    Args:
        management_address: of the settings; decides whether `Host` matters.
        allowed_origin: `cors_allowed_origin`.
        token_file: `management_token_file`.

    Raises:
        ConfigurationError: the token file cannot be read.
    """

    def __init__(
        self, management_address: str, allowed_origin: str | None, token_file: str | None
    ) -> None:
        self._loopback_only = is_bound_to_loopback(management_address)
        self._allowed_origin = allowed_origin
        self._token_file = TokenFile(token_file) if token_file else None

    def check_origin(self, request: Request) -> None:
        """Raises Forbidden for a page of somebody else."""
        host = request.header("host") or ""
        if self._loopback_only and host and not is_loopback(split_port(host)[0]):
            raise Forbidden(
                f"Host {host!r} is not this machine, to which management_address binds "
                "management; send the request to localhost."
            )
        origin = request.header("origin")
        if (
            origin is not None
            and not is_same_origin(origin, host)
            and not is_allowed_origin(origin, self._allowed_origin)
        ):
            raise Forbidden(
                f"Origin {origin!r} may not use management; cors_allowed_origin can allow it."
            )

    def check_token(self, request: Request) -> None:
        """Raises Unauthorized without the token, where one is demanded."""
        if self._token_file is not None:
            self._token_file.check(request.header("authorization"))

    def check(self, request: Request) -> None:
        """Raises Forbidden or Unauthorized."""
        self.check_origin(request)
        self.check_token(request)


def is_preflight(request: Request) -> bool:
    """Whether a browser asks before the request proper. It never sends the token then."""
    return (
        request.method == "OPTIONS"
        and request.header("origin") is not None
        and request.header("access-control-request-method") is not None
    )
