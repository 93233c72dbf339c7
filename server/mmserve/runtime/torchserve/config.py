"""`model-config.yaml`: what a model of TorchServe wants beside its handler."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 1 << 20
#: `*name` in one file: each can be as large as all before it together.
MAX_ALIASES = 16

#: Set on registration here: what the file says of them is not heeded.
REGISTRATION = (
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "responseTimeout",
    "startupTimeout",
    "jobQueueSize",
    "deviceType",
    "deviceIds",
)

_PARALLEL = "serve a model that fits one device"
#: Asks for a way of serving that is not there → what to do.
UNSERVED = {
    "parallelType": _PARALLEL,
    "parallelLevel": _PARALLEL,
    "torchrun": _PARALLEL,
    "continuousBatching": "answer each request in one piece",
    "sequenceBatching": "keep what belongs to a sequence outside the worker",
    "stateful": "keep what belongs to a sequence outside the worker",
    "asyncCommunication": "write a handler whose handle returns its answers",
    "useJobTicket": "bound the queue with job_queue_size",
    "useVenv": "install what the model needs where the server is",
}
_OFF = (None, False, "", 0, 1, "none")  # 1: parallelLevel of a model on one device


class BadConfig(Exception):
    """The text is for the user."""


def parse(text: str) -> dict[str, Any]:
    """The settings of the file. Raises BadConfig."""
    try:
        import yaml  # type: ignore[import-untyped]  # its stubs are no dependency of ours
    except ImportError:
        raise BadConfig("it can be read with PyYAML only; pip install pyyaml") from None
    try:
        aliases = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        if aliases > MAX_ALIASES:
            raise BadConfig(f"it has more than {MAX_ALIASES} aliases (*name)")
        config = yaml.safe_load(text)
    except (BadConfig, MemoryError):
        raise
    except Exception as error:  # a value that is not of its tag raises whatever it runs into
        raise BadConfig(f"it is not valid YAML: {' '.join(str(error).split())[:300]}") from None
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise BadConfig("it is no mapping of names to values")
    return config


def unserved(config: Mapping[str, Any]) -> str | None:
    """The first thing that cannot be served, and what to do; None where all can."""
    for name, instead in UNSERVED.items():
        value = config.get(name)
        if isinstance(value, bool):
            if value:
                return f"{name} is not supported: {instead}"
        elif value not in _OFF:
            return f"{name}={reprlib.repr(value)} is not supported: {instead}"
    return None


def unheeded(config: Mapping[str, Any]) -> list[str]:
    """Names of settings that are read nowhere."""
    named = [name for name in REGISTRATION if name in config]
    return [*named, "pt2"] if config.get("pt2") else named
