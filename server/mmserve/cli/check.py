"""Opens what a server of these settings opens at its start, to say what it would say."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mmserve.config.settings import Settings
from mmserve.errors import ConfigurationError


def errors(settings: Settings) -> list[str]:
    """Why the server would not start: certificate and token are opened as it opens them."""
    found = []
    for attempt in (_tls, _token):
        try:
            attempt(settings)
        except ConfigurationError as error:
            found.append(str(error))
    return found


def warnings(settings: Settings) -> Iterator[str]:
    """What it would start with, and probably is not meant."""
    if _wants_tls(settings) and not _has_certificate(settings):
        yield (
            "no certificate is configured: clients get a self-signed one; set keystore, "
            "or private_key_file and certificate_file"
        )
    store = settings.model_store
    if store is not None and os.path.isdir(store):  # noqa: PTH112 - the setting's own text
        try:
            os.scandir(store).close()
        except OSError as error:
            yield f"model_store={store} cannot be read: {error.strerror}"


def _tls(settings: Settings) -> None:
    if _wants_tls(settings) and _has_certificate(settings):
        from mmserve.frontend.tls import tls_of  # slow, and seldom needed

        tls_of(settings).context()


def _token(settings: Settings) -> None:
    if settings.management_token_file is not None:
        from mmserve.frontend.guard import TokenFile

        TokenFile(settings.management_token_file)


def _wants_tls(settings: Settings) -> bool:
    return settings.inference.is_tls or settings.management.is_tls


def _has_certificate(settings: Settings) -> bool:
    return bool(settings.keystore or settings.private_key_file or settings.certificate_file)
