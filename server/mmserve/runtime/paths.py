"""Which modules a model's code can import, and in what order they are looked for."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Container, Iterable
from typing import NamedTuple

from mmserve.runtime.failures import HandlerProblem

#: Where archives made for SageMaker keep their scripts.
CODE_DIR = "code"


class HandlerName(NamedTuple):
    """A handler text, taken apart.

    Attributes:
        directory: to be put onto the module path, relative to the model directory; "" for none.
        module: what is imported.
        function: what is called; `handle` where the text names none.
    """

    directory: str
    module: str
    function: str


def parse_handler(text: str) -> HandlerName:
    """Takes `module:function`, `module`, `dir/module.py:function` apart.

    The last colon divides, so that a Windows path keeps its drive.

    Raises:
        HandlerProblem: a part is missing.
    """
    path, colon, function = text.strip().rpartition(":")
    if not colon or "/" in function or "\\" in function:
        path, function = text.strip(), "handle"
    cut = max(path.rfind("/"), path.rfind("\\"))
    directory, module = path[: cut + 1], path[cut + 1 :]
    if module.endswith(".py"):
        module = module[: -len(".py")]
    if not module:
        raise HandlerProblem(f"The handler {text!r} names no module; write module:function.")
    if not function:
        raise HandlerProblem(f"The handler {text!r} names no function; write module:function.")
    return HandlerName(directory if len(directory) == 1 else directory[:-1], module, function)


def module_path(
    handler: HandlerName, model_dir: str, pythonpath: str, home: str | None = None
) -> list[str]:
    """What precedes the interpreter's own module path, in Multi Model Server's order.

    The handler's directory, `PYTHONPATH`, the model directory, then (ours) `code/` in it, then the
    install home unless it is a place for installed packages. Relative entries start at the model
    directory, which is the working directory.

    Args:
        pythonpath: the variable, as the server got it.
        home: `MODEL_SERVER_HOME`.
    """
    entries = [handler.directory] if handler.directory else []
    entries += [entry for entry in pythonpath.split(os.pathsep) if entry]
    entries += [model_dir, CODE_DIR]
    if home and not home.rstrip("/").endswith(("site-packages", "dist-packages")):
        entries.append(home)
    absolute = (os.path.normpath(os.path.join(model_dir, entry)) for entry in entries)
    return list(dict.fromkeys(absolute))


def set_module_path(
    handler: HandlerName, model_dir: str, pythonpath: str, home: str | None = None
) -> list[str]:
    """Makes this process find modules as a worker of Multi Model Server does.

    Processes that the handler starts find them too: `PYTHONPATH` says the same.

    Returns:
        What now precedes the interpreter's own module path.
    """
    code = os.path.join(model_dir, CODE_DIR)
    entries = [
        entry
        for entry in module_path(handler, model_dir, pythonpath, home)
        if entry != code or os.path.isdir(entry)
    ]
    sys.path[:] = entries + [entry for entry in sys.path if entry not in entries]
    os.environ["PYTHONPATH"] = os.pathsep.join(entries)
    importlib.invalidate_caches()
    return entries


def clashes(names: Iterable[str], loaded: Container[str]) -> str | None:
    """Why a fork would not see what a fresh interpreter sees.

    A fork of a process that holds a module `tqdm` gets that one, whatever `tqdm.py` the archive
    brings; in a fresh interpreter the archive's comes first on the path.

    Args:
        names: top-level modules that the archive offers.
        loaded: top-level modules that the process to be forked holds.

    Returns:
        The reason, for describe and the log; None when a fork is as good.
    """
    found = sorted(name for name in names if name in loaded)
    if not found:
        return None
    return f"its own module {found[0]!r} has the name of one that a fork would already hold"
