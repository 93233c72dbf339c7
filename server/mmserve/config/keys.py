"""The keys of `config.properties`, as data: made from the fields of `Settings`."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import Meta

from mmserve.config import addresses
from mmserve.config.settings import SECRETS, Settings

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,15}(?:\.[0-9]*)?|\.[0-9]+)")
_LARGEST = 2**63 - 1  # what a signed 64-bit number holds
_CONTROL = re.compile(r"[\0-\x1f\x7f\ud800-\udfff]")
_NAME = r"[^\W\d]\w*"
_MODULE = rf"{_NAME}(?:\.{_NAME})*(?::{_NAME})?"
_MODULES = re.compile(rf"{_MODULE}(?:,{_MODULE})*")
_SCHEMES = re.compile(r"(?:[a-z][a-z0-9+.-]*(?:,[a-z][a-z0-9+.-]*)*)?")
_LIST_OF_URLS = re.compile(r",\s*[a-z0-9]+(?:\(s\)\?)?:")
_YES, _NO = frozenset({"yes", "true", "y", "1"}), frozenset({"no", "false", "n", "0"})


class Key(NamedTuple):
    """One key.

    Attributes:
        name: as it is written.
        field: of `Settings`.
        default: None for "not set".
        description, unit, form, is_mms: see `settings.py`.
        type: int, float, bool or str.
        choices: the only values, where there are but a few.
        limits: `ge`, `gt`, `le` of a number.
        can_be_unset: an empty value stands for None.
    """

    name: str
    field: str
    default: object
    description: str
    unit: str
    form: str
    is_mms: bool
    type: type
    choices: tuple[str, ...]
    limits: Mapping[str, float]
    can_be_unset: bool

    @property
    def allowed(self) -> str:
        """What a value looks like, to follow "must be"."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.type in (int, float):
            text = "a whole number" if self.type is int else "a number"
            text += f" of {self.unit}"
            for limit, words in (("ge", "at least"), ("gt", "above"), ("le", "at most")):
                if limit in self.limits:
                    text += f", {words} {self.limits[limit]:g}"
        elif self.type is bool:
            text = "yes or no, true or false" if self.form == "y" else "true or false"
        else:
            text = _TEXT_FORMS[self.form][1]
        return text + (", or empty" if self.can_be_unset else "")

    def read(self, text: str) -> object:
        """The value that `text` stands for.

        Raises:
            ValueError: it stands for none; the message, to follow "must be", says what does.
        """
        bare = text.strip()
        if self.can_be_unset and not bare:
            return None
        if self.type is bool:
            return self._read_bool(bare)
        if self.type in (int, float):
            return self._read_number(bare)
        if self.choices:
            if bare.lower() not in self.choices:
                raise ValueError(self.allowed)
            return bare.lower()
        if _CONTROL.search(text):
            raise ValueError("text without control characters")
        return _TEXT_FORMS[self.form][0](text, self)

    def _read_bool(self, text: str) -> bool:
        if self.form == "exact":
            return text == "true"
        if self.form == "y":
            if text.lower() not in _YES | _NO:
                raise ValueError(self.allowed)
            return text.lower() in _YES
        return text.lower() == "true"

    def _read_number(self, text: str) -> int | float:
        shape, read = (_INTEGER, int) if self.type is int else (_NUMBER, float)
        if not shape.fullmatch(text):
            raise ValueError(self.allowed)
        value: int | float = read(text)
        limits = self.limits
        if (
            abs(value) > _LARGEST
            or value < limits.get("ge", value)
            or value <= limits.get("gt", value - 1)
            or value > limits.get("le", value)
        ):
            raise ValueError(self.allowed)
        return value

    def doubt(self, text: str) -> str | None:
        """What may surprise about a value that is read as Multi Model Server reads it."""
        if self.type is bool and self.form != "y" and not self.read(text):
            if text.strip().lower() not in ("false", ""):
                how = ", in lower case," if self.form == "exact" else ""
                return f"is read as false; only true{how} is true"
        elif self.form == "regex" and _LIST_OF_URLS.search(text):
            return "is one regular expression, not a list; join alternatives with |"
        return None

    def shown(self, value: object) -> str:
        """The value as it may be printed: as it is written in a file, secrets masked."""
        return "****" if self.name in SECRETS else self.written(value)

    @staticmethod
    def written(value: object) -> str:
        """The value as it is written in a file; `read` gives it back."""
        if value is None:
            return ""
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, float):
            return f"{value:.15g}"
        return str(value)


def _text(text: str, key: Key) -> str:
    return text


def _address(text: str, key: Key) -> str:
    try:
        addresses.read(text.strip(), key.name)
    except ValueError as error:
        raise ValueError(f"an address; {error}") from None
    return text.strip()


def _pattern(text: str, key: Key) -> str:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regular expression ({error})") from None
    return text


def _header(text: str, key: Key) -> str:
    if not text.isascii():
        raise ValueError(_TEXT_FORMS["header"][1])
    return text


def _shaped(shape: re.Pattern[str]) -> Callable[[str, Key], str]:
    def read(text: str, key: Key) -> str:
        compact = ",".join(part.strip() for part in text.split(","))
        if not shape.fullmatch(compact):
            raise ValueError(key.allowed)
        return compact

    return read


#: Form → (reader, what is allowed, to follow "must be").
_TEXT_FORMS: Mapping[str, tuple[Callable[[str, Key], str], str]] = {
    "text": (_text, "text"),
    "models": (_text, "ALL, or a comma list of [name=]location"),
    "address": (_address, addresses.ALLOWED),
    "regex": (_pattern, "a regular expression"),
    "header": (_header, "text in ASCII, for a header"),
    "imports": (
        _shaped(_MODULES),
        "default, none, or a comma list of modules, each with an optional :name",
    ),
    "schemes": (_shaped(_SCHEMES), "a comma list of URL schemes in lower case"),
}


def _key(name: str, field: str, hint: Any, default: object) -> Key | None:
    can_be_unset = False
    meta: Meta | None = None
    while True:  # Annotated[int, …] | None and Annotated[str | None, …] alike
        if typing.get_origin(hint) is typing.Annotated:
            meta = hint.__metadata__[0]
            hint = hint.__origin__
        elif typing.get_origin(hint) in (typing.Union, types.UnionType):
            can_be_unset = True
            (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
        else:
            break
    if meta is None or not meta.description or not meta.extra:
        return None
    choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    limits = {limit: getattr(meta, limit) for limit in ("ge", "gt", "le")}
    return Key(
        name=name,
        field=field,
        default=default,
        description=meta.description,
        unit=meta.extra["unit"],
        form=meta.extra["form"],
        is_mms=meta.extra["mms"],
        type=str if choices else hint,
        choices=choices,
        limits={limit: value for limit, value in limits.items() if value is not None},
        can_be_unset=can_be_unset,
    )


def _keys() -> dict[str, Key]:
    hints = typing.get_type_hints(Settings, include_extras=True)
    fields = zip(
        Settings.__struct_encode_fields__,
        Settings.__struct_fields__,
        Settings.__struct_defaults__,
        strict=True,
    )
    made = (_key(name, field, hints[field], default) for name, field, default in fields)
    return {key.name: key for key in made if key}


#: Name → key, in the order of `Settings`.
KEYS: Mapping[str, Key] = _keys()

#: Keys that only a Java virtual machine understands: accepted, without effect.
JVM_KEYS = frozenset(
    {
        "async_logging",
        "io_ratio",
        "model_server_home",
        "netty_client_threads",
        "number_of_netty_threads",
        "plugins_path",
        "prefer_direct_buffer",
        "use_native_io",
        "vmargs",
    }
)

_NOTHING = "there is no such thing here"
_NO_GRPC = "there is no gRPC here"
_METRICS = "metrics are lines in the files of metrics_location"

#: Keys of TorchServe, and misspellings from Multi Model Server's own samples → what they
#: correspond to. Source: TorchServe's documentation of config.properties.
FOREIGN_KEYS: Mapping[str, str] = {
    "batch_size": "a model's own batch_size, given when it is registered, decides",
    "cpu_launcher_args": _NOTHING,
    "cpu_launcher_enable": _NOTHING,
    "default_startup_timeout": "it is called load_timeout_seconds here",
    "disable_system_metrics": _NOTHING,
    "disable_token_authorization": "management_token_file turns tokens on, nothing else does",
    "enable_env_vars_config": "it is spelled enable_envvars_config",
    "enable_grpc_ssl": _NO_GRPC,
    "enable_metrics_api": _METRICS,
    "enable_model_api": "models can always be registered, at the management address",
    "grpc_inference_address": _NO_GRPC,
    "grpc_inference_max_connection_age_ms": _NO_GRPC,
    "grpc_inference_port": _NO_GRPC,
    "grpc_management_address": _NO_GRPC,
    "grpc_management_max_connection_age_ms": _NO_GRPC,
    "grpc_management_port": _NO_GRPC,
    "initial_worker_port": "workers have no ports here",
    "install_py_dep_per_model": "nothing is installed at run time; put it into the image",
    "ipex_enable": _NOTHING,
    "ipex_gpu_enable": _NOTHING,
    "limit_max_image_pixels": "handlers set PIL.Image.MAX_IMAGE_PIXELS themselves",
    "max_batch_delay": "a model's own max_batch_delay, given when it is registered, decides",
    "max_workers": "default_workers_per_model, or max_worker when a model is scaled",
    "maxWorkers": "default_workers_per_model, or max_worker when a model is scaled",
    "metrics_address": _METRICS,
    "metrics_config": _METRICS,
    "metrics_format": _METRICS,
    "metrics_mode": _METRICS,
    "minWorkers": "default_workers_per_model, or min_worker when a model is scaled",
    "model_api_enabled": "models can always be registered, at the management address",
    "model_snapshot": "nothing is saved between two starts; list models in load_models",
    "models": "it is called load_models here, and takes names and locations only",
    "snapshot_store": "nothing is saved between two starts; list models in load_models",
    "system_metrics_cmd": _NOTHING,
    "use_env_allowed_urls": "MMS_ALLOWED_URLS, with enable_envvars_config=true",
    "workflow_store": "there are no workflows here",
}
