"""`ts.service`."""

from collections.abc import Iterable

from mmserve.runtime.failures import PredictionException
from mmserve.runtime.metrics_store import Metric

__all__ = ["PREDICTION_METRIC", "PredictionException", "emit_metrics"]

PREDICTION_METRIC = "PredictionTime"


def emit_metrics(metrics: Iterable[Metric]) -> None:
    """Prints them as the server reads them from a worker's standard output."""
    for metric in metrics:
        print(f"[METRICS]{metric}")
