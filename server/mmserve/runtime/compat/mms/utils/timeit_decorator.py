"""`mms.utils.timeit_decorator`."""

import functools
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def timeit(func: Callable[P, R]) -> Callable[P, R]:
    """Logs how long each call took: wall time and this process's time on the CPU."""

    @functools.wraps(func)
    def timed(*args: P.args, **kwargs: P.kwargs) -> R:
        wall, cpu = time.perf_counter(), time.process_time()
        result = func(*args, **kwargs)
        logging.info(
            "%s took %.3f ms, %.3f ms of it on the CPU",
            func.__name__,
            (time.perf_counter() - wall) * 1e3,
            (time.process_time() - cpu) * 1e3,
        )
        return result

    return timed
