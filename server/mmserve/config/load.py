"""Where the settings come from: file, command line and environment meet here, once, at start."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from mmserve import platform
from mmserve.config import gpus, properties
from mmserve.config.keys import FOREIGN_KEYS, JVM_KEYS, KEYS
from mmserve.config.launch import Arguments
from mmserve.config.settings import Settings
from mmserve.errors import ConfigurationError

BUILT_IN = "built in"

#: The word that `--mms-config` takes in place of a file.
SAGEMAKER = "sagemaker"

#: Nobody writes a longer file by hand; a device or an archive named by mistake is longer.
_MAX_FILE_BYTES = 1 << 20

_VARIABLE = re.compile(r"\$\$([^$]{2,})\$\$")

#: Variables that count without `enable_envvars_config`.
_LOCATIONS = {"LOG_LOCATION": "log_location", "METRICS_LOCATION": "metrics_location"}


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Settings and the story behind them.

    Attributes:
        origins: field of `Settings` → where its value comes from, "built in" for a default.
        warnings: what is probably not meant, one sentence each.
        notices: what has no effect here, one sentence each, for INFO.
        file: the configuration file, None where there is none.
        can_write_logs: False where `log_to` is `stdout` only because the folder cannot be written.
    """

    settings: Settings
    origins: Mapping[str, str]
    warnings: list[str]
    notices: list[str]
    file: str | None
    can_write_logs: bool = True


class _Text(NamedTuple):
    """A value as it was written, and where."""

    text: str
    origin: str


def load_settings(
    arguments: Arguments,
    environ: Mapping[str, str],
    cwd: str | os.PathLike[str] = os.curdir,
    *,
    with_gpus: bool = True,
    errors: list[str] | None = None,
) -> Loaded:
    """Reads and checks everything.

    A later one wins: built in, file, command line, then the environment where the file says
    `enable_envvars_config=true`; `LOG_LOCATION` and `METRICS_LOCATION` always count.

    Args:
        arguments: the front's command line.
        environ: in place of `os.environ`.
        cwd: where a relative file is looked for.
        with_gpus: False leaves `nvidia-smi` alone and believes `number_of_gpu`.
        errors: collects what is wrong with single keys, in place of the first being raised; such
            a key has its default then.

    Raises:
        ConfigurationError: names key, value, what is allowed and where the value stands.
    """

    def refuse(message: str) -> None:
        if errors is None:
            raise ConfigurationError(message) from None
        errors.append(message)

    cwd = Path(cwd)
    file, data = _read_file(arguments, environ, cwd)
    if arguments.mms_config == SAGEMAKER and file == SAGEMAKER:
        environ = _with_payload_size(environ)
    warnings: list[str] = []
    notices: list[str] = []

    texts = _from_file(file, data, environ, refuse)
    if ignored := sorted(JVM_KEYS & texts.keys()):
        notices.append(f"only a Java virtual machine needs {', '.join(ignored)}; they do nothing")
    if arguments.log_config is not None:
        notices.append(f"{arguments.log_config} is for log4j and not read; log_level is here")
    warnings += [
        f"{name or 'a line without a key'} ({text.origin}) is unknown and ignored{_hint(name)}"
        for name, text in texts.items()
        if name not in KEYS and name not in JVM_KEYS
    ]
    if arguments.model_store is not None:
        texts["model_store"] = _Text(arguments.model_store, "--model-store")
    if arguments.models is not None:
        texts["load_models"] = _Text(arguments.models, "--models")
    warnings += _add_environment(texts, environ)
    _add_platform(texts, environ, is_profile=file == SAGEMAKER)

    values: dict[str, object] = {}
    origins = dict.fromkeys(Settings.__struct_fields__, BUILT_IN)
    for name, key in KEYS.items():
        if (written := texts.get(name)) is None:
            continue
        try:
            values[key.field] = key.read(written.text)
        except ValueError as error:
            refuse(f"{name}={key.shown(written.text)} ({written.origin}): it must be {error}")
            continue
        origins[key.field] = written.origin
        if doubt := key.doubt(written.text):
            warnings.append(f"{name}={key.shown(written.text)} ({written.origin}) {doubt}")

    values["cpu_count"], origins["cpu_count"] = platform.cpu_count()
    settings = Settings(**values)  # type: ignore[arg-type]  # `Key.read` has checked each
    if with_gpus and origins["number_of_gpu"] != "MMS_NUMBER_OF_GPU":
        settings = _with_gpus(settings, environ, origins, warnings)
    can_write_logs = origins["log_to"] != BUILT_IN or _can_write(cwd / settings.log_location)
    if not can_write_logs:
        settings = msgspec.structs.replace(settings, log_to="stdout")
        origins["log_to"] = f"{settings.log_location} cannot be written"
    warnings += _doubts(settings, cwd, on_sagemaker=_on_sagemaker(environ, file == SAGEMAKER))
    return Loaded(
        settings=settings,
        origins=origins,
        warnings=warnings,
        notices=notices,
        file=file,
        can_write_logs=can_write_logs,
    )


# The file


def _read_file(
    arguments: Arguments, environ: Mapping[str, str], cwd: Path
) -> tuple[str | None, bytes]:
    """The file that counts, and its bytes. A file that is named must be there."""
    for path, named_by in (
        (environ.get("MMS_CONFIG_FILE"), "MMS_CONFIG_FILE"),
        (arguments.mms_config, "--mms-config"),
    ):
        if path == SAGEMAKER and named_by == "--mms-config":
            return SAGEMAKER, Path(__file__).with_name("sagemaker.properties").read_bytes()
        if path:
            return path, _bytes_of(cwd / path, f"{path} ({named_by})")
    found = cwd / "config.properties"
    if not found.exists():
        return None, b""
    return "config.properties", _bytes_of(found, "config.properties (in the current directory)")


def _bytes_of(path: Path, shown: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise ConfigurationError(
            f"the configuration file {shown} is a directory; "
            "container engines make one where the file to mount is missing"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a zero character in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(
            f"the configuration file {shown} cannot be read: {reason}"
        ) from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigurationError(
            f"the configuration file {shown} has more than {_MAX_FILE_BYTES} bytes"
        )
    return data


def _from_file(
    file: str | None, data: bytes, environ: Mapping[str, str], refuse: Callable[[str], None]
) -> dict[str, _Text]:
    try:
        entries = properties.parse(data)
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}, {error}") from None
    texts = {}
    for name, entry in entries.items():
        origin = f"{file}, line {entry.line}"
        missing = [each for each in _VARIABLE.findall(entry.value) if each not in environ]
        for variable in missing:
            refuse(
                f"Invalid Environment Variable {variable}: {name} ({origin}) asks for it, "
                "and it is not set"
            )
        if not missing:
            text = _VARIABLE.sub(lambda variable: environ[variable[1]], entry.value)
            texts[name] = _Text(text, origin)
    return texts


def _hint(name: str) -> str:
    """What to write in place of an unknown key, as the end of a sentence."""
    if name in FOREIGN_KEYS:
        return f": {FOREIGN_KEYS[name]}"
    near = _nearest(name, [*KEYS, *FOREIGN_KEYS], cutoff=0.7)
    return f"; did you mean {near}?" if near else ""


def _nearest(name: str, known: list[str], cutoff: float) -> str | None:
    import difflib  # only for those who mistype

    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return near[0] if near else None


# The environment


def _add_environment(texts: dict[str, _Text], environ: Mapping[str, str]) -> Iterator[str]:
    """Adds what the environment says; yields warnings."""
    switch = texts.get("enable_envvars_config")
    is_on = bool(switch and KEYS["enable_envvars_config"].read(switch.text))
    known = {f"MMS_{name.upper()}": name for name in KEYS if name != "enable_envvars_config"}
    for variable in sorted(name for name in environ if name.startswith("MMS_")):
        if variable == "MMS_CONFIG_FILE":
            continue
        if variable == "MMS_ENABLE_ENVVARS_CONFIG":
            yield f"{variable} is not used: only the file can set enable_envvars_config"
        elif name := known.get(variable):
            if is_on:
                texts[name] = _Text(environ[variable], variable)
            else:
                yield (
                    f"{variable} is set but not used: enable_envvars_config=true in the "
                    "configuration file turns such variables on"
                )
        elif is_on and (near := _nearest(variable, list(known), cutoff=0.85)):
            yield f"{variable} is unknown and ignored; did you mean {near}?"
    for variable, name in _LOCATIONS.items():
        if environ.get(variable):
            texts[name] = _Text(environ[variable], variable)


def _on_sagemaker(environ: Mapping[str, str], is_profile: bool) -> bool:
    return is_profile or "SAGEMAKER_MULTI_MODEL" in environ


def _add_platform(texts: dict[str, _Text], environ: Mapping[str, str], *, is_profile: bool) -> None:
    """Defaults that differ where SageMaker is the caller."""
    if not _on_sagemaker(environ, is_profile):
        return
    is_multi_model = environ.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true"
    for name, text in (
        ("ping_mode", "live" if is_multi_model else "ready"),
        ("max_queue_wait_seconds", "55"),  # the platform gives up after 60
        ("log_to", "stdout"),  # what CloudWatch shows
    ):
        texts.setdefault(name, _Text(text, "default on SageMaker"))


def _with_payload_size(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Batch transform says how large its requests are, in MiB, in a variable of its own."""
    size = environ.get("SAGEMAKER_MAX_PAYLOAD_IN_MB", "")
    if "SAGEMAKER_MAX_REQUEST_SIZE" in environ or not (size.isdecimal() and len(size) < 10):
        return environ
    return {**environ, "SAGEMAKER_MAX_REQUEST_SIZE": str(int(size) << 20)}


# The machine


def _with_gpus(
    settings: Settings, environ: Mapping[str, str], origins: dict[str, str], warnings: list[str]
) -> Settings:
    """`number_of_gpu` is a number, and not above what is there."""
    asked = settings.number_of_gpu
    if asked == 0:
        return settings
    there = gpus.detected(environ)
    if asked is not None and asked <= there:
        return settings
    if asked is not None:
        warnings.append(
            f"number_of_gpu={asked} ({origins['number_of_gpu']}): nvidia-smi lists {there}; "
            f"{there} will be used"
        )
    origins["number_of_gpu"] = "nvidia-smi" if there else "no GPU found"
    return msgspec.structs.replace(settings, number_of_gpu=there)


def _can_write(folder: Path) -> bool:
    """Whether the folder, or the nearest above it that exists, lets us make files."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _doubts(settings: Settings, cwd: Path, *, on_sagemaker: bool) -> Iterator[str]:
    """Settings that are right one by one, and probably not meant together."""
    if settings.model_store is not None and not (cwd / settings.model_store).is_dir():
        yield f"model_store={settings.model_store} is no directory; no local model can be loaded"
    if settings.load_models and settings.load_models.upper() == "ALL" and not settings.model_store:
        yield "load_models=ALL loads nothing without model_store"
    if bool(settings.private_key_file) != bool(settings.certificate_file):
        yield "private_key_file and certificate_file are used only together"
    if settings.cors_allowed_origin == "*" and not settings.management_token_file:
        yield (
            "cors_allowed_origin=* lets every web page use management, where it runs code here; "
            "name the origin, or ask for a token with management_token_file"
        )
    if (
        not settings.management.is_loopback
        and not settings.management_token_file
        and not on_sagemaker
    ):
        yield (
            f"management_address={settings.management_address} can be reached from other machines, "
            "and whoever reaches it can run code here; management_token_file asks for a token"
        )
