"""Where a listener binds: `http://host:port`, `https://host:port` or `unix:/path`."""

from __future__ import annotations

import re
import socket

import msgspec

from mmserve.errors import ConfigurationError

#: Ports where the address names none, as Multi Model Server: (http, https).
_DEFAULT_PORTS = {"management_address": (8081, 8444)}
_OTHER_DEFAULT_PORTS = (80, 443)

#: `sockaddr_un.sun_path` holds 108 bytes on Linux and 104 on macOS, the final zero included.
_MAX_PATH_BYTES = 103

_TCP = re.compile(r"(https?)://(\[[^\]\s]+\]|[^\s/?#@:\[\]]+)(?::([0-9]+))?", re.IGNORECASE)
_UNIX = re.compile(r"unix:(/[^\0]+)", re.IGNORECASE)

_V6_LOOPBACK = bytes(15) + b"\1"
_V4_MAPPED = bytes(10) + b"\xff\xff"

ALLOWED = (
    "http://HOST[:PORT], https://HOST[:PORT] or unix:/ABSOLUTE/PATH, without a slash at the end"
)


class Address(msgspec.Struct, frozen=True):
    """A parsed address.

    Attributes:
        scheme: "http", "https" or "unix".
        host: name or literal, IPv6 without its brackets; "" for a unix socket.
        port: 0 to 65535, 0 for any that is free; 0 for a unix socket.
        path: of a unix socket, else "".
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    @property
    def is_unix(self) -> bool:
        return self.scheme == "unix"

    @property
    def is_loopback(self) -> bool:
        """Only this machine can reach it: loopback, or a unix socket."""
        return self.is_unix or is_loopback(self.host)

    def same_listener(self, other: Address) -> bool:
        """Whether one listener serves both; as in Multi Model Server the scheme does not count.

        Two ports 0 are two ports: management never lands on the inference port by accident.
        """
        if self.is_unix or other.is_unix:
            return self.is_unix and other.is_unix and self.path == other.path
        return self.port != 0 and (self.host, self.port) == (other.host, other.port)

    @property
    def url(self) -> str:
        """As it is written in the configuration, port included."""
        if self.is_unix:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse(text: str, key: str = "inference_address") -> Address:
    """Reads the value of `key`, which decides the port where the text names none.

    Raises:
        ConfigurationError: the message names key, value and what is allowed.
    """
    try:
        return read(text, key)
    except ValueError as error:
        raise ConfigurationError(f"{key}={text} is not an address; {error}") from None


def read(text: str, key: str) -> Address:
    """As `parse`. Raises ValueError, whose message says what is wrong or allowed."""
    if unix := _UNIX.fullmatch(text):
        path = "/" + unix[1].lstrip("/")
        if len(path.encode(errors="surrogateescape")) > _MAX_PATH_BYTES:
            raise ValueError(f"the path of a socket has at most {_MAX_PATH_BYTES} bytes")
        return Address("unix", path=path)
    if not (tcp := _TCP.fullmatch(text)):
        raise ValueError(f"use {ALLOWED}")
    scheme, host = tcp[1].lower(), tcp[2]
    if host.startswith("["):
        host = host[1:-1]
        if not _is_ipv6(host):
            raise ValueError(f"[{host}] is no IPv6 address")
    if tcp[3] is None:
        http, https = _DEFAULT_PORTS.get(key, _OTHER_DEFAULT_PORTS)
        return Address(scheme, host, https if scheme == "https" else http)
    if len(tcp[3].lstrip("0")) > 5 or (port := int(tcp[3])) > 65535:
        raise ValueError("a port is a number from 0 (any that is free) to 65535")
    return Address(scheme, host, port)


def is_loopback(host: str) -> bool:
    """Whether a host, as a name or an address without brackets, can only be this machine."""
    host = host.lower().removesuffix(".")
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761, section 6.3
        return True
    if v4 := _packed(socket.AF_INET, host):
        return v4[0] == 127
    v6 = _packed(socket.AF_INET6, host)
    return v6 == _V6_LOOPBACK or v6[:13] == _V4_MAPPED + b"\x7f"


def _is_ipv6(host: str) -> bool:
    literal, percent, zone = host.partition("%")
    return bool(_packed(socket.AF_INET6, literal)) and bool(zone) == bool(percent)


def _packed(family: int, text: str) -> bytes:
    """The bytes of an address literal; b"" where it is none."""
    try:
        return socket.inet_pton(family, text)
    except (OSError, ValueError):  # ValueError: half a surrogate pair, a zero character
        return b""
