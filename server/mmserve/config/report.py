"""The effective settings as lines of text: for `mmserve config` and the log of the start."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from mmserve.config.keys import KEYS, Key
from mmserve.config.load import Loaded
from mmserve.config.settings import Settings

#: What may be secret in a URL: user and password, and the signature in a query.
_URL_USER = re.compile(r"(?<=://)[^/?#,\s]+@")
_URL_QUERY = re.compile(r"(?<=\?)[^#,\s]+")


def lines(loaded: Loaded) -> list[str]:
    """One line per setting, `key = value unit  [origin]`, in columns."""
    rows = [
        (key.name, _value(key, loaded.settings), loaded.origins[key.field]) for key in KEYS.values()
    ]
    rows.append(("CPUs", str(loaded.settings.cpu_count), loaded.origins["cpu_count"]))
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(44, max(len(value) for _, value, _ in rows))
    return [
        f"{name:{name_width}} = {value:{value_width}}  [{origin}]" for name, value, origin in rows
    ]


def mask_urls(text: str) -> str:
    """Text without the passwords and signatures that URLs in it may carry."""
    return _URL_QUERY.sub("****", _URL_USER.sub("****@", text)) if "://" in text else text


def _value(key: Key, settings: Settings) -> str:
    value = getattr(settings, key.field)
    if value is None:
        return "not set" + "".join(f" ({note})" for note in _effect(key.field, settings))
    text = mask_urls(key.shown(value)) or '""'
    if key.unit and not (key.field == "default_response_timeout_seconds" and value < 0):
        text += f" {key.unit}"
    return text + "".join(f" ({note})" for note in _effect(key.field, settings))


def _effect(field: str, settings: Settings) -> Iterator[str]:
    """What a value amounts to, where its own text does not say."""
    match field:
        case "default_response_timeout" if settings.default_response_timeout_seconds < 0:
            yield _seconds(settings.response_timeout_s)
        case "default_response_timeout":
            yield "default_response_timeout_seconds decides"
        case "default_response_timeout_seconds" if settings.debug:
            yield "not used"
        case "default_response_timeout_seconds" if settings.default_response_timeout_seconds < 0:
            yield "not used"
        case "load_timeout_seconds" if settings.load_timeout_seconds is None or settings.debug:
            yield _seconds(settings.load_timeout_s)
        case "max_queue_wait_seconds" if settings.max_queue_wait_seconds is None:
            yield _seconds(settings.queue_wait_s)
        case "default_workers_per_model" if settings.default_workers_per_model == 0:
            yield f"{settings.startup_workers} at start"
        case "management_address" if settings.management.same_listener(settings.inference):
            yield "one listener for both"


def _seconds(limit_s: float) -> str:
    return "no limit" if limit_s == math.inf else f"{limit_s:g} seconds"
