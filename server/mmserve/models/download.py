"""Downloads an archive over HTTP or from S3, within limits of time and size.

Nothing that a server answers is shown to whoever asked for the download: an address of the inner
network would otherwise be readable through us.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import os
import re
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urljoin

import msgspec

from mmserve.errors import DownloadFailed, ServeError, SourceNotFound, StorageFailed
from mmserve.models.disk import storage_failed
from mmserve.models.limits import DownloadLimits, Rules
from mmserve.models.source import Remote, is_allowed, parse_remote, scheme_of, without_credentials
from mmserve.models.watch import Watch

_REDIRECTS = (301, 302, 303, 307, 308)
_READ_BYTES = 256 * 1024


class Sink:
    """The file that a download goes to, its digest, and its limits."""

    def __init__(self, fd: int, path: str, limits: DownloadLimits, url: str) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._fd, self._path, self._limits, self._url = fd, path, limits, url

    def expect(self, size: int) -> None:
        """Raises DownloadFailed for a declared size that is too large."""
        if size > self._limits.max_bytes:
            raise self._too_large()

    def write(self, data: bytes | memoryview) -> None:
        """Raises DownloadFailed, StorageFailed."""
        self.size += len(data)
        if self.size > self._limits.max_bytes:
            raise self._too_large()
        self.digest.update(data)
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                raise storage_failed("write", self._path, error) from error

    def _too_large(self) -> DownloadFailed:
        limit = self._limits.max_bytes
        return DownloadFailed(self._url, reason=f"it is larger than {limit} bytes")


def download_http(
    remote: Remote,
    sink: Sink,
    *,
    rules: Rules,
    limits: DownloadLimits,
    watch: Watch,
    make_room: Callable[[int], None],
) -> None:
    """Follows redirects, each checked as the first URL was, and writes the body to the sink.

    Raises:
        DownloadFailed: the other end is at fault, or led where it may not.
        StorageFailed: our disk is.
    """
    first = remote.shown
    try:
        for _ in range(limits.max_redirects + 1):
            location = _get(remote, sink, first, limits, watch, make_room)
            if location is None:
                return
            remote = _redirected(remote, location, rules, first)
    except ServeError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        # ValueError: what http.client makes of a bad chunk size or header
        raise DownloadFailed(first, reason=watch.reason or _cause(error)) from error
    raise DownloadFailed(first, reason=f"more than {limits.max_redirects} redirects")


def _get(
    remote: Remote,
    sink: Sink,
    shown_url: str,
    limits: DownloadLimits,
    watch: Watch,
    make_room: Callable[[int], None],
) -> str | None:
    """One request. The place it redirects to, or None when the body is in the sink."""
    connection = _connect(remote, limits)
    try:
        with watch.over(connection.sock):
            if watch.reason:
                raise TimeoutError(watch.reason)
            connection.sock.settimeout(limits.silence_s)
            headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "mmserve"}
            if remote.login is not None:
                login = base64.b64encode(":".join(remote.login).encode()).decode()
                headers["Authorization"] = f"Basic {login}"
            connection.request("GET", remote.target, headers=headers)
            response = connection.getresponse()
            location = response.getheader("Location")
            if response.status in _REDIRECTS and location:
                return location
            if response.status != 200:
                raise DownloadFailed(shown_url, code=response.status)
            _read_body(response, sink, shown_url, watch, make_room)
            return None
    finally:
        connection.close()


def _connect(remote: Remote, limits: DownloadLimits) -> http.client.HTTPConnection:
    connection: http.client.HTTPConnection
    if remote.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(
            remote.host, remote.port, timeout=limits.connect_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(remote.host, remote.port, timeout=limits.connect_s)
    connection.connect()
    return connection


def _read_body(
    response: http.client.HTTPResponse,
    sink: Sink,
    shown_url: str,
    watch: Watch,
    make_room: Callable[[int], None],
) -> None:
    declared = response.length
    if declared is not None:
        sink.expect(declared)
        make_room(declared)
    buffer = memoryview(bytearray(_READ_BYTES))
    while count := response.readinto(buffer):
        sink.write(buffer[:count])
        if declared is None:
            make_room(_READ_BYTES)
    if watch.reason:
        raise TimeoutError(watch.reason)
    if declared is not None and sink.size < declared:
        why = f"it was cut off after {sink.size} of {declared} bytes"
        raise DownloadFailed(shown_url, reason=why)


def _redirected(remote: Remote, location: str, rules: Rules, shown_url: str) -> Remote:
    url = urljoin(remote.url, location)
    scheme = scheme_of(url, rules)
    if scheme not in ("http", "https") or (remote.scheme, scheme) == ("https", "http"):
        why = f"it redirects to {_place(url)}, whose scheme is not allowed here"
        raise DownloadFailed(shown_url, reason=why)
    if not is_allowed(url, rules):
        why = f"it redirects to {_place(url)}, which allowed_urls does not allow"
        raise DownloadFailed(shown_url, reason=why)
    try:
        target = parse_remote(url)
    except (SourceNotFound, DownloadFailed):
        raise DownloadFailed(shown_url, reason="it redirects to a malformed url") from None
    same_place = (target.scheme, target.host, target.port) == (
        remote.scheme,
        remote.host,
        remote.port,
    )
    login = target.login or (remote.login if same_place else None)
    return msgspec.structs.replace(target, login=login)


def _place(url: str) -> str:
    """Scheme and host of where a server sends us, enough to allow it: the rest is an answer."""
    scheme, mark, rest = without_credentials(url).partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    return f"{scheme}{mark}{host}/…"


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return str(error) or "it timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, http.client.IncompleteRead):
        return "it was cut off"
    return type(error).__name__


def download_s3(
    remote: Remote,
    sink: Sink,
    *,
    limits: DownloadLimits,
    watch: Watch,
    make_room: Callable[[int], None],
) -> None:
    """`s3://BUCKET/KEY`, with the credentials and the region that boto3 finds.

    Raises:
        DownloadFailed: S3 does not give it.
        StorageFailed: our disk, or boto3 is not installed.
    """
    try:
        import boto3
        import botocore.client
        import botocore.exceptions
    except ImportError:
        raise StorageFailed(
            "s3:// locations need boto3, which is not installed: pip install 'mmserve[aws]'."
        ) from None
    url = remote.shown
    bucket, _, key = remote.url.partition("://")[2].partition("/")
    if not key:
        raise SourceNotFound(f"Invalid model url: {url}")
    config = botocore.client.Config(
        connect_timeout=limits.connect_s,
        read_timeout=limits.silence_s,
        retries={"total_max_attempts": 3},
    )
    failures = (botocore.exceptions.BotoCoreError, botocore.exceptions.HTTPClientError, OSError)
    try:
        client: Any = boto3.session.Session().client("s3", config=config)
        with contextlib.closing(client):
            answer = client.get_object(Bucket=bucket, Key=key)
            sink.expect(answer["ContentLength"])
            make_room(answer["ContentLength"])
            with contextlib.closing(answer["Body"]) as body:
                while data := body.read(_READ_BYTES):
                    sink.write(data)
                    if watch.reason:
                        raise DownloadFailed(url, reason=watch.reason)
    except botocore.exceptions.ClientError as error:
        code = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        name = error.response.get("Error", {}).get("Code")
        raise DownloadFailed(url, code=code, reason=name) from error
    except failures as error:
        raise DownloadFailed(url, reason=type(error).__name__) from error
