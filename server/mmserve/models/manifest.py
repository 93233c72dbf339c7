"""What an archive says about itself, and what a registration makes of it.

Formats: `MAR-INF/MANIFEST.json` 1.0 and the 0.x `MANIFEST.json` of Multi Model Server. Values are
read as its JSON library reads them into text fields: a number or a truth value is taken as its
text, so that `"modelVersion": 1.0` is the version "1.0".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mmserve.errors import InvalidModel

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

RUNTIMES = ("python", "python2", "python3")

#: What Multi Model Server calls the manifest in this message; scripts match on the text.
_UNREADABLE = "Failed to parse signature.json."


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that the server uses.

    Attributes:
        model_name, handler, version: as written; None where they are not.
        runtime: "python", "python2" or "python3"; None where the manifest names another.
        has_engine: there is an `engine` object, which must then have a name.
        engine: its name.
        text: the file, for the handler's context; "" where there is none.
        guessed_name, guessed_handler: what the files tell where nobody says anything; weakest.
    """

    model_name: str | None = None
    handler: str | None = None
    version: str | None = None
    runtime: str | None = "python"
    has_engine: bool = False
    engine: str | None = None
    text: str = ""
    guessed_name: str | None = None
    guessed_handler: str | None = None


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """What the registration and the settings say, stronger than the manifest or weaker.

    Attributes:
        model_name, handler, runtime: win over the manifest; None or "" for nothing.
        default_name, default_handler: used where neither of the two says anything.
    """

    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    default_name: str | None = None
    default_handler: str | None = None


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is in the end."""

    name: str
    handler: str
    runtime: str
    version: str | None = None
    engine: str | None = None


def parse(text: str) -> Manifest:
    """Reads a 1.0 manifest.

    Raises:
        InvalidModel: it is not a JSON object, or a field has the wrong type.
    """
    root = _object(text)
    model = _member(root, "model") or {}
    engine = _member(root, "engine")
    runtime = _text(root, "runtime") if "runtime" in root else "python"
    return Manifest(
        model_name=_text(model, "modelName"),
        handler=_text(model, "handler"),
        version=_text(model, "modelVersion"),
        runtime=runtime if runtime in RUNTIMES else None,
        has_engine=engine is not None,
        engine=None if engine is None else _text(engine, "engineName"),
        text=text,
    )


def parse_legacy(text: str) -> Manifest:
    """Reads a 0.x manifest.

    Raises:
        InvalidModel: as `parse`, or there is no `Service`.
    """
    root = _object(text)
    model = _member(root, "Model") or {}
    engine = _member(root, "Engine")
    service = _text(model, "Service")
    if not service:
        raise InvalidModel("Missing Service entry in MANIFEST.json")
    return Manifest(
        model_name=_text(model, "Model-Name"),
        handler=service,
        version="snapshot",
        has_engine=engine is not None,
        engine="MXNet" if engine and _is_number(engine.get("MXNet")) else None,
        text=text,
    )


def resolve(manifest: Manifest, overrides: Overrides) -> Resolved:
    """What the model is called and how it is run.

    Raises:
        InvalidModel: something is missing, the first that is, in Multi Model Server's order; or
            the name has control characters.
    """
    name = overrides.model_name or manifest.model_name or overrides.default_name
    handler = overrides.handler or manifest.handler or overrides.default_handler
    name, handler = name or manifest.guessed_name, handler or manifest.guessed_handler
    runtime = overrides.runtime or manifest.runtime
    if not name:
        raise InvalidModel("Model name is not defined.")
    if _CONTROL.search(name):  # no request line, log or terminal would carry it as it is
        raise InvalidModel(
            "The model's name must not contain control characters; "
            "the registration may give it another: model_name."
        )
    if not handler:
        raise InvalidModel("Model handler is not defined.")
    if not runtime:
        raise InvalidModel("Runtime is not defined or invalid.")
    if manifest.has_engine and manifest.engine is None:
        raise InvalidModel("engineName is required in <engine>.")
    return Resolved(
        name=name,
        handler=handler,
        runtime=runtime,
        version=manifest.version,
        engine=manifest.engine,
    )


def default_model_name(url: str) -> str | None:
    """The name of a start-up model that has none: from the last part of its location.

    The extension goes where the text holds `.mar` or `.model`, and every character that is not
    of a word becomes `_` (`no.na-me_1.mar` is `no_na_me_1`).
    """
    path = url
    if "://" in url:
        try:
            path = urlsplit(url).path
        except ValueError:
            return None
    last = path.rstrip("/").rpartition("/")[2]
    for ending in (".tar.gz", ".tgz"):  # Multi Model Server cannot read these
        last = last.removesuffix(ending)
    if ".mar" in url or ".model" in url:
        last = last.rpartition(".")[0] or last
    return re.sub(r"\W", "_", last, flags=re.ASCII) or None


def _object(text: str) -> Mapping[str, Any]:
    try:
        # Numbers keep their spelling: a version 1.10 is not 1.1.
        root = json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_Number)
    except (ValueError, RecursionError):
        raise InvalidModel(_UNREADABLE) from None
    if not isinstance(root, dict):
        raise InvalidModel(_UNREADABLE)
    return root


class _Number(str):
    """A JSON number, as it was written."""

    __slots__ = ()


def _is_number(value: object) -> bool:
    return isinstance(value, _Number)


def _member(parent: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = parent.get(name)
    if value is None or isinstance(value, dict):
        return value
    raise InvalidModel(_UNREADABLE)


def _text(parent: Mapping[str, Any], name: str) -> str | None:
    value = parent.get(name)
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str) or not _can_travel(value):
        raise InvalidModel(_UNREADABLE)
    return str(value)


def _can_travel(text: str) -> bool:
    """False for half of a surrogate pair (`"\\ud800"`), which no encoding can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
