"""The context that a handler written for TorchServe is given."""

from __future__ import annotations

import os
from typing import Any

from mmserve.runtime.context import Context
from mmserve.runtime.failures import HandlerProblem
from mmserve.runtime.metrics_store import MetricsStore
from mmserve.runtime.torchserve import config, entries
from mmserve.runtime.torchserve.metrics import TorchServeMetrics


class TorchServeContext(Context):
    """As for Multi Model Server's handlers, and what TorchServe has beside.

    Attributes:
        model_yaml_config: the archive's `configFile`, {} where it has none.
    """

    metrics_type = TorchServeMetrics

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: Any,
        batch_size: int,
        gpu: int | None,
        mms_version: str | None = None,
        limit_max_image_pixels: bool = True,
        metrics: MetricsStore | None = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(model_name, model_dir, manifest, batch_size, gpu)
        properties = self.system_properties
        properties["limit_max_image_pixels"] = limit_max_image_pixels
        if mms_version is not None:
            properties["server_version"] = mms_version
        self.model_yaml_config = {} if model_yaml_config is None else model_yaml_config
        self._metrics = metrics
        self.stopping_criteria = None

    def get_sequence_id(self, idx: int) -> str:
        """The request's header `ts_request_sequence_id`, "" without one."""
        return self.get_request_header(idx, "ts_request_sequence_id") or ""


def yaml_config(model_dir: str, manifest: Any) -> dict[str, Any]:
    """What the manifest's `configFile` says; {} where there is none.

    Raises:
        HandlerProblem: it cannot be read.
    """
    name = entries(manifest).get("configFile")
    if name is None:
        return {}
    try:
        with open(os.path.join(model_dir, name), encoding="utf-8") as file:
            text = file.read(config.MAX_BYTES)
        return config.parse(text)
    except (OSError, UnicodeDecodeError, config.BadConfig) as error:
        raise HandlerProblem(f"The configFile {name} of the archive: {error}.") from None


def notes(model_dir: str, manifest: Any, settings: dict[str, Any], path: list[str]) -> list[str]:
    """Lines for the log: what the archive asks for and does not get, without harm."""
    lines = []
    if names := config.unheeded(settings):
        lines.append(
            f"The archive's {entries(manifest)['configFile']} sets {', '.join(names)}: not heeded; "
            "workers and batches are set on registration, and nothing is compiled."
        )
    if (name := entries(manifest).get("requirementsFile")) is not None:
        from mmserve.runtime.torchserve.requirements import of_another_version

        try:
            with open(os.path.join(model_dir, name), encoding="utf-8") as file:
                others = of_another_version(file.read(config.MAX_BYTES), path)
        except (OSError, UnicodeDecodeError):
            others = []
        if others:
            lines.append(f"The archive's {name} asks for other versions: {', '.join(others)}.")
    return lines
