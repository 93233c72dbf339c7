"""Every setting, in one frozen object."""

# Annotations are objects here, not text: `keys.py` reads them at start, and compiling each costs.
import math
import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mmserve.config import addresses
from mmserve.config.addresses import Address

#: Keys whose value is not for logs.
SECRETS = frozenset({"keystore_pass"})


def _mms(description: str, unit: str = "", form: str = "text", **limits: Any) -> Meta:
    """A key of Multi Model Server.

    Args:
        description: what it does; the docs and the shipped `config.properties` show it.
        unit: of the number, in the plural.
        form: how the text is read and checked, a row of `keys.FORMS`.
        limits: `ge`, `gt`, `le` of a number.
    """
    return Meta(description=description, extra={"unit": unit, "form": form, "mms": True}, **limits)


def _own(description: str, unit: str = "", form: str = "text", **limits: Any) -> Meta:
    """A key of ours; arguments as for `_mms`."""
    return Meta(description=description, extra={"unit": unit, "form": form, "mms": False}, **limits)


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename={"num_workers": "NUM_WORKERS"}):
    """Keys keep the spelling of Multi Model Server; our own carry their unit in the name.

    A field without a description is no key: it is found out at start.
    """

    # Multi Model Server's keys

    inference_address: Annotated[
        str, _mms("Where predictions, `/ping` and `/invocations` are served.", form="address")
    ] = "http://127.0.0.1:8080"
    management_address: Annotated[
        str,
        _mms(
            "Where models are registered, scaled and removed. The same as `inference_address`: "
            "one listener serves both. Whoever reaches it can run code here.",
            form="address",
        ),
    ] = "http://127.0.0.1:8081"
    model_store: Annotated[
        str | None,
        _mms("Directory of local archives; without it only URLs can be loaded."),
    ] = None
    load_models: Annotated[
        str | None,
        _mms("Models to load at start: `ALL`, or a comma list of `[name=]location`.", "", "models"),
    ] = None
    default_workers_per_model: Annotated[
        int,
        _mms(
            "Workers of a model that does not ask for a number. 0: none for a model that is "
            "registered; for those loaded at start one per GPU, or per CPU where there is none.",
            "workers",
            ge=0,
            le=10_000,
        ),
    ] = 0
    num_workers: (
        Annotated[
            int,
            _mms(
                "Workers of a model loaded at start, where `default_workers_per_model` is 0.",
                "workers",
                ge=0,
                le=10_000,
            ),
        ]
        | None
    ) = None
    default_response_timeout: Annotated[
        int,
        _mms("How long a worker may take for one batch; then it is replaced.", "minutes", ge=0),
    ] = 120
    default_response_timeout_seconds: Annotated[
        int,
        _mms("The same in seconds; from 0 on it replaces `default_response_timeout`.", "seconds"),
    ] = -1
    unregister_model_timeout: Annotated[
        int,
        _mms("How long running requests may take when their model is removed.", "seconds", ge=0),
    ] = 120
    job_queue_size: Annotated[
        int, _mms("How many may wait per model; one more is answered 503.", "requests", ge=1)
    ] = 100
    number_of_gpu: (
        Annotated[
            int,
            _mms(
                "GPUs to use, at most those that `nvidia-smi` lists. Not set: all of them. "
                "`MMS_NUMBER_OF_GPU` may exceed what is there.",
                "GPUs",
                ge=0,
                le=1024,
            ),
        ]
        | None
    ) = None
    max_request_size: Annotated[
        int, _mms("Largest request body; a larger one is answered 413.", "bytes", ge=1)
    ] = 6_553_500
    max_response_size: Annotated[
        int, _mms("Largest response body of a model; a larger one is answered 500.", "bytes", ge=1)
    ] = 6_553_500
    decode_input_request: Annotated[
        bool,
        _mms("Hand JSON to handlers as objects and text as `str`; false: bytes.", "", "exact"),
    ] = True
    preload_model: Annotated[
        bool,
        _mms("Load a model once and fork its workers from it, so that they share memory.", "", "y"),
    ] = False
    default_service_handler: Annotated[
        str | None, _mms("Handler of models whose manifest names none, `module:function`.")
    ] = None
    blacklist_env_vars: Annotated[
        str,
        _mms("Environment variables whose whole name matches are kept from workers.", "", "regex"),
    ] = ""
    cors_allowed_origin: Annotated[
        str | None, _mms("Sent as `access-control-allow-origin` on every reply.", "", "header")
    ] = None
    cors_allowed_methods: Annotated[
        str | None, _mms("Sent as `access-control-allow-methods` on every reply.", "", "header")
    ] = None
    cors_allowed_headers: Annotated[
        str | None, _mms("Sent as `access-control-allow-headers` on every reply.", "", "header")
    ] = None
    keystore: Annotated[
        str | None, _mms("PKCS12 file with key and certificate, for `https://` addresses.")
    ] = None
    keystore_pass: Annotated[str, _mms("Password of the keystore and of its key.")] = "changeit"
    keystore_type: Annotated[str, _mms("Format of the keystore.")] = "PKCS12"
    private_key_file: Annotated[
        str | None, _mms("PEM key, in place of a keystore; needs `certificate_file`.")
    ] = None
    certificate_file: Annotated[
        str | None, _mms("PEM chain, leaf first; needs `private_key_file`.")
    ] = None
    metric_time_interval: Annotated[
        int, _mms("How often the host's metrics are written.", "seconds", ge=1)
    ] = 60
    debug: Annotated[
        bool,
        _mms("For debuggers: no time limits, and one worker for each model loaded at start."),
    ] = False
    enable_envvars_config: Annotated[
        bool,
        _mms(
            "Let environment variables `MMS_<KEY>` override every key of the file. "
            "It can be set only in the file."
        ),
    ] = False

    # Our own

    preload_imports: Annotated[
        str,
        _own(
            "What is imported once, before workers are forked: `default` (torch, torchvision and "
            "what BERT needs of transformers), `none`, or a comma list of `module` and "
            "`module:name`.",
            form="imports",
        ),
    ] = "default"
    worker_start: Annotated[
        Literal["fork", "fresh"],
        _own("How a worker starts: forked from what is imported already, or a new interpreter."),
    ] = "fork" if sys.platform == "linux" else "fresh"
    allowed_url_schemes: Annotated[
        str, _own("Schemes from which archives may be downloaded, a comma list.", form="schemes")
    ] = "http,https"
    allowed_urls: Annotated[
        str,
        _own("Only archives whose whole URL matches are downloaded, redirects too.", form="regex"),
    ] = ".*"
    archive_cache_dir: Annotated[
        str | None,
        _own("Where unpacked archives stay. Not set: a temporary one that goes with the server."),
    ] = None
    load_timeout_seconds: (
        Annotated[
            float,
            _own(
                "How long a worker may take to load its model. Not set: as for a batch, but at "
                "least 120.",
                "seconds",
                gt=0,
            ),
        ]
        | None
    ) = None
    max_queue_wait_seconds: (
        Annotated[
            float,
            _own(
                "How long a request may wait for a worker before it is answered 503. Not set: as "
                "long as a batch may take; on SageMaker, which gives up after 60: 55.",
                "seconds",
                ge=0,
            ),
        ]
        | None
    ) = None
    max_worker_restarts: (
        Annotated[
            int,
            _own(
                "Restarts in a row after which a model is given up. Not set: none.",
                "restarts",
                ge=0,
            ),
        ]
        | None
    ) = None
    max_worker_processes: (
        Annotated[
            int,
            _own("Workers of all models. Not set: half the processes allowed.", "processes", ge=1),
        ]
        | None
    ) = None
    worker_max_requests: (
        Annotated[
            int,
            _own("A worker is replaced after so many, between two batches.", "requests", ge=1),
        ]
        | None
    ) = None
    worker_memory_limit: (
        Annotated[
            int,
            _own(
                "A worker that has grown above it is replaced, between two batches.", "bytes", ge=1
            ),
        ]
        | None
    ) = None
    fail_on_startup_error: Annotated[
        bool, _own("End the server when a model of `load_models` cannot be loaded.")
    ] = False
    ping_mode: Annotated[
        Literal["mms", "live", "ready"],
        _own(
            "`mms`: `/ping` is always 200. `live`: 200 while the server can work. `ready`: 503 "
            "while a model loaded at start is missing or has no worker that is ready, or no worker "
            "is left at all. On SageMaker `live` with many models, `ready` with one."
        ),
    ] = "mms"
    management_token_file: Annotated[
        str | None,
        _own("File with a token that management requests must bear: `Authorization: Bearer …`."),
    ] = None
    server_timing: Annotated[
        bool, _own("Say in a `server-timing` header how long a request waited and ran.")
    ] = False
    batch_policy: Annotated[
        Literal["auto", "fill", "immediate"],
        _own(
            "`fill`: a batch waits `max_batch_delay` for more. `immediate`: a free worker takes "
            "what is there. `auto`: fill for models registered with a `max_batch_delay`."
        ),
    ] = "auto"
    busy_poll_us: Annotated[
        int,
        _own(
            "How long the server and a worker stay awake for what usually follows at once, where "
            "a handler takes less than that. 0: never; nor on a single CPU.",
            "microseconds",
            ge=0,
            le=10_000,
        ),
    ] = 100
    log_to: Annotated[
        Literal["files", "stdout", "both"],
        _own(
            "Where log lines go. `stdout` on SageMaker, and where the log folder cannot be written."
        ),
    ] = "files"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _own("Lines below it are not written.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], _own("Multi Model Server's lines, or one JSON object per line.")
    ] = "text"
    access_log: Annotated[
        Literal["all", "no-ping", "errors", "off"], _own("Which requests get a line.")
    ] = "all"
    idle_timeout_seconds: Annotated[
        float, _own("A kept-alive connection without a request is closed.", "seconds", gt=0)
    ] = 75.0
    header_timeout_seconds: Annotated[
        float, _own("Time for the head of a request, from its first byte.", "seconds", gt=0)
    ] = 30.0
    body_timeout_seconds: Annotated[
        float, _own("Time without a single byte of a body.", "seconds", gt=0)
    ] = 60.0
    stop_timeout_seconds: Annotated[
        float, _own("Time for running requests when the server stops.", "seconds", ge=0)
    ] = 30.0
    log_location: Annotated[
        str, _own("Folder of the log files; the variable `LOG_LOCATION` wins.")
    ] = "logs"
    metrics_location: Annotated[
        str, _own("Folder of the metric files; the variable `METRICS_LOCATION` wins.")
    ] = "logs"

    # Found out at start

    cpu_count: int = 1

    @property
    def inference(self) -> Address:
        return addresses.parse(self.inference_address, "inference_address")

    @property
    def management(self) -> Address:
        return addresses.parse(self.management_address, "management_address")

    @property
    def response_timeout_s(self) -> float:
        """Seconds a worker may take for one batch; infinity where `debug` is on."""
        if self.debug:
            return math.inf
        if self.default_response_timeout_seconds >= 0:
            return float(self.default_response_timeout_seconds)
        return self.default_response_timeout * 60.0

    @property
    def load_timeout_s(self) -> float:
        """Seconds a worker may take to load its model; infinity where `debug` is on."""
        if self.load_timeout_seconds is not None and not self.debug:
            return self.load_timeout_seconds
        return max(120.0, self.response_timeout_s)

    @property
    def queue_wait_s(self) -> float:
        """Seconds a request may wait before a worker takes it."""
        if self.max_queue_wait_seconds is not None:
            return self.max_queue_wait_seconds
        return self.response_timeout_s

    @property
    def busy_poll_s(self) -> float:
        """Seconds to stay awake; 0 on a single CPU, where that only keeps others from working."""
        return self.busy_poll_us / 1e6 if self.cpu_count > 1 else 0.0

    @property
    def startup_workers(self) -> int:
        """Workers of a model loaded at start."""
        if self.debug:
            return 1
        return (
            self.default_workers_per_model
            or self.num_workers
            or self.number_of_gpu
            or self.cpu_count
        )

    def __repr__(self) -> str:
        """Only what differs from the defaults, without secrets: it may end up in a log."""
        named = (
            f"{name}={'****' if name in SECRETS else repr(value)}"
            for name, value, default in zip(
                self.__struct_fields__,
                msgspec.structs.astuple(self),
                self.__struct_defaults__,
                strict=True,
            )
            if value != default
        )
        return f"Settings({', '.join(named)})"
