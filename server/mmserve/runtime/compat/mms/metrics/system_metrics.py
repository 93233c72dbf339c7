"""`mms.metrics.system_metrics`: host metrics, measured by the handler that asks for them."""

from types import ModuleType

import psutil

from mmserve.runtime.metrics_store import Dimension, Metric

system_metrics: list[Metric] = []
dimension = [Dimension("Level", "Host")]

_MEGABYTE = 1 << 20
_GIGABYTE = 1 << 30


def cpu_utilization() -> None:
    _add("CPUUtilization", psutil.cpu_percent(), "percent")


def memory_used() -> None:
    _add("MemoryUsed", psutil.virtual_memory().used / _MEGABYTE, "MB")


def memory_available() -> None:
    _add("MemoryAvailable", psutil.virtual_memory().available / _MEGABYTE, "MB")


def memory_utilization() -> None:
    _add("MemoryUtilization", psutil.virtual_memory().percent, "percent")


def disk_used() -> None:
    _add("DiskUsage", psutil.disk_usage("/").used / _GIGABYTE, "GB")


def disk_available() -> None:
    _add("DiskAvailable", psutil.disk_usage("/").free / _GIGABYTE, "GB")


def disk_utilization() -> None:
    _add("DiskUtilization", psutil.disk_usage("/").percent, "percent")


def collect_all(mod: ModuleType) -> None:
    """Calls the module's public functions (but this one) and prints the metrics they add."""
    for name, function in sorted(vars(mod).items()):
        own = getattr(function, "__module__", None) == mod.__name__
        if own and callable(function) and not name.startswith("_") and name != "collect_all":
            function()
    for metric in system_metrics:
        print(f"[METRICS]{metric}")
    system_metrics.clear()


def _add(name: str, value: float, unit: str) -> None:
    system_metrics.append(Metric(name, round(value, 2), unit, dimension))
