"""Every setting, in one frozen object."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec
from msgspec import Meta


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys keep the spelling of Multi Model Server; our own carry their unit in the name."""

    # Multi Model Server's keys
    inference_address: str = "http://127.0.0.1:8080"
    management_address: str = "http://127.0.0.1:8081"
    model_store: str | None = None
    load_models: str | None = None
    default_workers_per_model: Annotated[int, Meta(ge=0)] = 0
    default_response_timeout: Annotated[int, Meta(ge=0, description="minutes")] = 120
    default_response_timeout_seconds: int = -1
    unregister_model_timeout: Annotated[int, Meta(ge=0, description="seconds")] = 120
    job_queue_size: Annotated[int, Meta(ge=1)] = 100
    number_of_gpu: Annotated[int, Meta(ge=0)] | None = None
    max_request_size: Annotated[int, Meta(ge=1)] = 6_553_500
    max_response_size: Annotated[int, Meta(ge=1)] = 6_553_500
    decode_input_request: bool = True
    preload_model: bool = False
    default_service_handler: str | None = None
    blacklist_env_vars: str = ""
    cors_allowed_origin: str | None = None
    cors_allowed_methods: str | None = None
    cors_allowed_headers: str | None = None
    keystore: str | None = None
    keystore_pass: str = "changeit"
    keystore_type: str = "PKCS12"
    private_key_file: str | None = None
    certificate_file: str | None = None
    metric_time_interval: Annotated[int, Meta(ge=1, description="seconds")] = 60
    debug: bool = False

    # Our own
    preload_imports: str = "default"  # "default", "none", or module names with commas
    worker_start: str = "fork"  # or "fresh"
    allowed_url_schemes: str = "http,https"
    allowed_urls: str = ".*"
    archive_cache_dir: str | None = None
    load_timeout_seconds: float | None = None
    max_queue_wait_seconds: float | None = None
    max_worker_restarts: int | None = None
    max_worker_processes: int | None = None
    worker_max_requests: int | None = None
    worker_memory_limit: int | None = None
    fail_on_startup_error: bool = False
    ping_mode: str = "mms"
    management_token_file: str | None = None
    server_timing: bool = False
    batch_policy: str = "auto"
    log_to: str = "files"
    log_level: str = "info"
    log_format: str = "text"
    access_log: str = "all"
    idle_timeout_seconds: float = 75.0  # keep-alive
    header_timeout_seconds: float = 30.0  # from the first byte of a head to its end
    body_timeout_seconds: float = 60.0  # without a byte of the body
    stop_timeout_seconds: float = 30.0  # graceful drain
    log_location: str = "logs"
    metrics_location: str = "logs"

    @property
    def response_timeout_s(self) -> float:
        """Seconds a worker may take for one batch."""
        if self.default_response_timeout_seconds >= 0:
            return float(self.default_response_timeout_seconds)
        return self.default_response_timeout * 60.0

    @property
    def load_timeout_s(self) -> float:
        """Seconds a worker may take to load its model."""
        if self.load_timeout_seconds is not None:
            return self.load_timeout_seconds
        return max(120.0, self.response_timeout_s)

    @property
    def queue_wait_s(self) -> float:
        """Seconds a request may wait before a worker takes it."""
        if self.max_queue_wait_seconds is not None:
            return self.max_queue_wait_seconds
        return self.response_timeout_s

    @property
    def startup_workers(self) -> int:
        """Workers of a model loaded at start."""
        return self.default_workers_per_model or self.number_of_gpu or os.cpu_count() or 1
