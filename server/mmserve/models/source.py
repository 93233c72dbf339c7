"""Where the `url` of a registration leads: to a path below the model store, or elsewhere.

Order and texts are Multi Model Server's: clients match on them.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import msgspec

from mmserve.errors import BadRequest, DownloadFailed, SourceNotFound
from mmserve.models.limits import Rules

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRETS = re.compile(
    r"(?i)(?<=[?&])([^=&]*(?:sign|token|secret|key|credential|password|passwd|sig)[^=&]*)=[^&#]*"
)


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """Something to download.

    Attributes:
        url: as given.
        scheme: lower case.
        host, port: port None for the scheme's own.
        target: path and query, quoted for a request line.
        login: (user, password) of the URL, or None.
    """

    url: str
    scheme: str
    host: str
    port: int | None
    target: str
    login: tuple[str, str] | None = None

    @property
    def shown(self) -> str:
        return shown(self.url)


def shown(url: str) -> str:
    """A URL for messages and logs: without credentials, in the host part or the query."""
    return _SECRETS.sub(r"\1=***", without_credentials(url))


def without_credentials(url: str) -> str:
    """The URL without `user:password@`."""
    head, mark, rest = url.partition("://")
    if not mark:
        return url
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return head + mark + authority.rpartition("@")[2] + rest[len(authority) :]


def scheme_of(url: str, rules: Rules) -> str | None:
    """The allowed scheme of a URL, in lower case; None for what is a path below the store."""
    match = _SCHEME.match(url)
    if match and (scheme := match[1].lower()) in rules.schemes:
        return scheme
    return None


def is_allowed(url: str, rules: Rules) -> bool:
    """Whether `allowed_urls` names it."""
    return re.fullmatch(rules.urls, without_credentials(url)) is not None


def parse_remote(url: str) -> Remote:
    """Cuts an absolute URL.

    Raises:
        SourceNotFound: it is malformed.
        DownloadFailed: it is not, but leads to no server: it has no host, or port 0.
    """
    invalid = SourceNotFound(f"Invalid model url: {shown(url)}")
    if any(character < " " or character == "\x7f" for character in url):
        raise invalid  # urlsplit would drop some of them
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        login = None
        if parts.username is not None:
            login = (unquote(parts.username), unquote(parts.password or ""))
        host = _ascii_host(host) if host else ""
    except (ValueError, UnicodeError):
        raise invalid from None
    if not host or port == 0:
        raise DownloadFailed(shown(url))
    try:
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = quote(parts.query, safe="/?%:@!$&'()*+,;=~-._")
    except UnicodeError:
        raise invalid from None
    target = f"{path}?{query}" if query else path
    return Remote(
        url=url, scheme=parts.scheme.lower(), host=host, port=port, target=target, login=login
    )


def _ascii_host(host: str) -> str:
    if ":" in host:
        return str(ipaddress.IPv6Address(host.partition("%")[0]))
    name = host.encode("idna").decode("ascii")
    if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise ValueError(host)
    return name


def local_path(url: str, store: str | None) -> Path:
    """Where a `url` that is no URL leads, below the model store. Looks at no disk.

    Raises:
        BadRequest: it is empty.
        SourceNotFound: it climbs, there is no store, or it is the store itself.
    """
    if not url.strip():
        raise BadRequest("Parameter url is required.")
    if ".." in url:
        raise SourceNotFound(f"Relative path is not allowed in url: {shown(url)}")
    if not store:
        raise SourceNotFound("Model store has not been configured.")
    root = Path(os.path.abspath(store))  # noqa: PTH100 - links stay as they are written
    path = root / url.lstrip("/")
    if "\0" in url or path == root:
        raise not_in_store(url)
    return path


def not_in_store(url: str, why: str = "") -> SourceNotFound:
    tail = f" ({why})" if why else ""
    return SourceNotFound(f"Model not found in model store: {shown(url)}{tail}")


def is_within(path: Path, bounds: Path) -> bool:
    """Whether a path stays below `bounds`, itself resolved, once links are followed."""
    try:
        return path.resolve().is_relative_to(bounds)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle
        return False
