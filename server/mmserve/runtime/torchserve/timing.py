"""Decorators that measure a handler's methods."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def timeit(func: Callable[P, R]) -> Callable[P, R]:
    """Logs how long each call took."""

    @functools.wraps(func)
    def measured(*args: P.args, **kwargs: P.kwargs) -> R:
        began = time.perf_counter()
        result = func(*args, **kwargs)
        logging.info("%s took %.3f ms", func.__name__, (time.perf_counter() - began) * 1e3)
        return result

    return measured


def timed(func: Callable[..., R]) -> Callable[..., R]:
    """Adds a metric `ts_handler_<method>` in milliseconds, where the handler has its context."""

    @functools.wraps(func)
    def measured(self: Any, *args: Any, **kwargs: Any) -> R:
        began = time.perf_counter()
        result = func(self, *args, **kwargs)
        if (context := getattr(self, "context", None)) is not None:
            took_ms = round((time.perf_counter() - began) * 1e3, 2)
            context.metrics.add_time(f"ts_handler_{func.__name__}", took_ms, None, "ms")
        return result

    return measured
