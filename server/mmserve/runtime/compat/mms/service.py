"""`mms.service`."""

from collections.abc import Callable, Iterable
from typing import Any

from mmserve.runtime.context import Context
from mmserve.runtime.failures import PredictionException
from mmserve.runtime.metrics_store import Metric

__all__ = ["PREDICTION_METRIC", "PredictionException", "Service", "emit_metrics"]

PREDICTION_METRIC = "PredictionTime"


class Service:
    """A model and its entry point, for code that names the type or builds one in a test."""

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: Any,
        entry_point: Callable[[Any, Context], Any],
        gpu: int | None,
        batch_size: int,
    ) -> None:
        self._context = Context(model_name, model_dir, manifest, batch_size, gpu)
        self._entry_point = entry_point

    @property
    def context(self) -> Context:
        return self._context


def emit_metrics(metrics: Iterable[Metric]) -> None:
    """Prints them as the server reads them from a worker's standard output."""
    for metric in metrics:
        print(f"[METRICS]{metric}")
