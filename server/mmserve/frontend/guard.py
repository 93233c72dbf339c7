"""Who may use management: not a page of somebody else in a browser, and who has the token.

Registering a URL runs its code, so that two tricks of web pages matter. A page may send requests
across origins (it cannot read the replies, but it need not): its `Origin` gives it away. Or it may
bind its own host name to 127.0.0.1 (DNS rebinding): then `Host` does.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from mmserve.config.addresses import Address, is_loopback
from mmserve.errors import ConfigurationError, Forbidden, Unauthorized
from mmserve.frontend.http import Request

_log = logging.getLogger(__name__)

_DEFAULT_PORTS = {"http": "80", "https": "443"}
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s:@/?#\[\]]+))(?::([0-9]*))?")


# Quiet: texts in, answers out


def split_authority(authority: str) -> tuple[str, str] | None:
    """Host, without brackets and in lower case, and port ("" where there is none).

    None for what is no `host[:port]`; user information is not let pass as a port.
    """
    if not (parts := _AUTHORITY.fullmatch(authority.lower())):
        return None
    v6, name, port = parts.groups(default="")
    return v6 or name, port


def named_host(target: str, host: str | None) -> str:
    """The authority that a request names: an absolute target goes before `Host`.

    Source: RFC 9112, section 3.2.2.
    """
    _, mark, rest = ("", "", "") if target.startswith("/") else target.partition("://")
    return re.split("[/?#]", rest, maxsplit=1)[0] if mark else host or ""


def is_same_origin(origin: str, host: str) -> bool:
    """Whether an `Origin` is the server that the request's `Host` names.

    The scheme is not compared: behind a proxy that ends TLS it is not ours to know.
    """
    scheme, _, authority = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme.lower())
    ours, theirs = split_authority(host), split_authority(authority)
    if default is None or ours is None or theirs is None:
        return False
    return (ours[0], ours[1] or default) == (theirs[0], theirs[1] or default)


def _is_this_machine(authority: str) -> bool:
    parts = split_authority(authority)
    return parts is not None and is_loopback(parts[0])


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
        # In constant time; a file that is empty or gone lets nobody in. Headers are Latin-1 here.
        if not hmac.compare_digest(given.encode("latin-1", "replace"), token) or not token:
            raise Unauthorized("The management token is wrong.")


class Guard:
    """Stands before every management route.

    Args:
        address: of management; `Host` matters where TCP reaches it from this machine only.
        allowed_origin: `cors_allowed_origin`.
        token_file: `management_token_file`.

    Raises:
        ConfigurationError: the token file cannot be read.
    """

    def __init__(
        self, address: Address, allowed_origin: str | None, token_file: str | None
    ) -> None:
        # No browser reaches a unix socket.
        self._loopback_only = address.is_loopback and not address.is_unix
        self._allowed_origin = allowed_origin
        self._token_file = TokenFile(token_file) if token_file else None

    def check_origin(self, request: Request) -> None:
        """Raises Forbidden for a page of somebody else."""
        host = named_host(request.target, request.header("host"))
        if self._loopback_only and host and not _is_this_machine(host):
            raise Forbidden(
                f"Host {host!r} is not this machine, to which management_address binds "
                "management; send the request to localhost."
            )
        for name, origin in request.headers:
            if (
                name.lower() == "origin"
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


def is_preflight(request: Request) -> bool:
    """Whether a browser asks before the request proper. It never sends the token then."""
    return (
        request.method == "OPTIONS"
        and request.header("origin") is not None
        and request.header("access-control-request-method") is not None
    )
