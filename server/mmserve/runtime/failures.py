"""What can go wrong with a model's code, and how it is told."""

from __future__ import annotations

import errno
import traceback
from types import TracebackType
from typing import Any

from mmserve.wire.messages import LoadFailed

_MAX_CAUSE = 1000
_HERE = __name__.rpartition(".")[0]

#: Texts of allocators. Sources: c10/cuda/CUDACachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp,
#: CUDA runtime error 2, cuBLAS status 3.
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


class PredictionException(Exception):
    """A handler raises it to choose status and message of the error response."""

    def __init__(self, message: Any, error_code: Any = 500) -> None:
        super().__init__(message)
        self.message, self.error_code = message, error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class BadInput(Exception):
    """A request's body is not what its type says. The text is for the client."""


class BadReply(Exception):
    """What the handler wants to answer cannot be sent. The text is for the client."""


class LoadProblem(Exception):
    """The model cannot be loaded.

    Attributes:
        error: why, for a debugger.
        message: tells the front.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(cause_of(error))
        self.error = error
        self.message = LoadFailed(
            sendable(cause_of(error)), is_out_of_memory(error), sendable(trace_of(error))
        )


class HandlerProblem(Exception):
    """The handler text leads to no handler."""


def sendable(text: str) -> str:
    """The text, with escapes for what has no UTF-8 form: a lone surrogate."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def prediction_exception(error: BaseException) -> tuple[Any, Any] | None:
    """(message, status) of a PredictionException, ours or that of an installed `mms`; else None."""
    for kind in type(error).__mro__:
        if kind is PredictionException or (
            kind.__name__ == "PredictionException" and kind.__module__ == "mms.service"
        ):
            return getattr(error, "message", str(error)), getattr(error, "error_code", 500)
    return None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was the reason, the CPU's or a GPU's; what an error was raised from counts."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
            return True  # torch's, whose name has changed places over its releases
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY):
            return True
        error = error.__cause__
    return False


def cause_of(error: BaseException) -> str:
    """One line: the exception's type and text."""
    if isinstance(error, HandlerProblem):
        text = str(error)
    else:
        try:
            text = str(error)
        except Exception:
            text = "(its text cannot be read)"
        name = type(error).__qualname__
        text = f"{name}: {text}" if text else name
    return " ".join(text.split())[:_MAX_CAUSE]


def trace_of(error: BaseException) -> str:
    """The traceback from the model's own code on, for the log."""
    if isinstance(error, HandlerProblem):
        return cause_of(error)  # it names what is wrong; where we noticed it helps nobody
    try:
        own = _without_us(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, own))
    except Exception:  # an exception may define a __str__ that raises
        return cause_of(error)


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    rest = trace
    while rest is not None:
        module = rest.tb_frame.f_globals.get("__name__", "")
        if not str(module).startswith((_HERE, "importlib")):
            return rest
        rest = rest.tb_next
    return trace
