"""Bytes as a configuration file: they are read, or refused with a ConfigurationError."""

import contextlib

from mmserve.config import properties
from mmserve.config.keys import KEYS
from mmserve.errors import ConfigurationError


def one_input(data: bytes) -> None:
    with contextlib.suppress(ConfigurationError):
        for name, entry in properties.parse(data).items():
            if name in KEYS:
                with contextlib.suppress(ValueError):  # the sentence of a ConfigurationError
                    KEYS[name].read(entry.value)
