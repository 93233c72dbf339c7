"""From a Load to a model that can predict: module path, handler, first call."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import msgspec

from mmserve.runtime.context import Context
from mmserve.runtime.failures import HandlerProblem, LoadProblem
from mmserve.runtime.paths import HandlerName, parse_handler, set_module_path
from mmserve.runtime.process import say
from mmserve.runtime.torchserve import BUILTIN, builtin_module, is_torchserve
from mmserve.wire.messages import Load, Loaded

#: What the model's own code is called with: data (None once, while it loads) and the context.
Entry = Callable[[Any, Context], Any]

# Read by the maths libraries when they load; a user's own setting stands (MMS 1.1.11 sets both).
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MXNET_USE_OPERATOR_TUNING": "0"}


class LoadedModel:
    """A model in this process.

    Attributes:
        order: what it was told to load.
        context: the one that the handler knows.
        entry: called with the data of a batch and the context.
        load_s: seconds it took.
        metrics: finished metric lines of the load.
    """

    def __init__(self, order: Load, context: Context, entry: Entry) -> None:
        self.order, self.context, self.entry = order, context, entry
        self.load_s = 0.0
        self.metrics: list[str] = []
        self._environ = dict(os.environ)  # with what the handler has set while it loaded

    def take(self, order: Load) -> None:
        """In a fork of a template: the order for this worker, whose device may be another."""
        self.order = order
        self.context.system_properties.update(_own_properties(order))
        os.environ.clear()
        os.environ.update(self._environ)

    def loaded(self) -> Loaded:
        """The answer to the Load."""
        why_not = why_not_fork()
        return Loaded(self.load_s, self.metrics, can_fork=not why_not, why_not=why_not)


def load_model(order: Load) -> LoadedModel:
    """Loads the model into this process: once, for the process is marked by it.

    Working directory, module path and environment become those of a worker of Multi Model Server.

    Raises:
        LoadProblem: the handler was not found, or refused.
    """
    began = time.monotonic()
    try:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ["MMS_DECODE_INPUT_REQUEST"] = "true" if order.decode_input else "false"
        os.chdir(order.model_dir)
        manifest = _manifest(order.manifest)
        make_context = _torchserve_context if is_torchserve(manifest) else Context
        context = make_context(
            order.model_name, order.model_dir, manifest, order.batch_size, order.gpu_id
        )
        context.system_properties.update(_own_properties(order))
        handler = parse_handler(order.handler)
        path = set_module_path(
            handler,
            order.model_dir,
            os.environ.get("PYTHONPATH", ""),
            os.environ.get("MODEL_SERVER_HOME"),
        )
        if is_torchserve(manifest):
            entry = _start_torchserve(handler, path, context)
        else:
            entry = start_handler(import_handler(handler, path), handler.function, context)
        model = LoadedModel(order, context, entry)
    except BaseException as error:  # sys.exit while it loads is a refusal like any other
        problem = LoadProblem(error)
    else:
        if (metrics := context.take_metrics()) is not None:
            model.metrics, _ = metrics.lines(time.time())
        gc.collect()
        gc.freeze()  # the collector need not look at the model again, nor forks unshare its pages
        model.load_s = time.monotonic() - began
        return model
    raise problem


def _own_properties(order: Load) -> dict[str, Any]:
    return {"batch_size": order.batch_size, "gpu_id": order.gpu_id, **order.properties}


def _manifest(text: str) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except msgspec.DecodeError:
        return None


def _torchserve_context(name: str, folder: str, manifest: Any, size: int, gpu: int | None) -> Any:
    # Few models need it: the others do not pay for the module.
    from mmserve.runtime.torchserve import context

    made = context.TorchServeContext(name, folder, manifest, size, gpu)
    made.model_yaml_config = context.yaml_config(folder, manifest)
    for line in context.notes(folder, manifest, made.model_yaml_config, sys.path):
        say(line)
    return made


def _start_torchserve(handler: HandlerName, path: list[str], context: Context) -> Entry:
    """As `import_handler` and `start_handler`, by TorchServe's rules.

    The module may be one that the archive does not bring, a class need not be alone in it, nor
    have `initialize`.
    """
    kind: type | None = None
    try:
        module = import_handler(handler, path)
    except ModuleNotFoundError as missing:
        builtin = builtin_module(handler.module)
        if missing.name != handler.module or builtin is None:
            raise
        module = importlib.import_module(builtin)
        kind = getattr(module, BUILTIN[handler.module])
    if kind is None and not hasattr(module, handler.function):
        kind = _first_handler(module)
    if kind is None:
        return start_handler(module, handler.function, context)
    return _start_class(kind, context, needed=("handle",))


def _first_handler(module: ModuleType) -> type | None:
    for value in vars(module).values():
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if is_own and callable(getattr(value, "handle", None)):
            return value  # type: ignore[no-any-return]  # a class, as just seen
    return None


def import_handler(handler: HandlerName, path: list[str]) -> ModuleType:
    """Imports the handler's module.

    Args:
        path: what precedes the interpreter's own module path.

    Raises:
        HandlerProblem: its file would be hidden by a module that is imported already.
        Exception: whatever its code raises.
    """
    name = handler.module
    top = name.partition(".")[0]
    held = sys.modules.get(top)
    if held is not None and (own := _file_of(top, path)) and own != _origin(held):
        whose = "Python itself" if top in sys.stdlib_module_names else "a library"
        raise HandlerProblem(
            f"The handler's file {os.path.basename(own)} has the name of a module of {whose}, "
            f"which is imported already. Rename it."
        )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name not in (name, top):
            raise
        # A name that import cannot spell, such as `handler.v2.py`.
        for directory in path:
            file = os.path.join(directory, f"{name}.py")
            if os.path.isfile(file):
                return _import_file(name, file)
        raise


def _file_of(top: str, path: list[str]) -> str | None:
    """File of the module that a fresh interpreter would find on this path."""
    spec = importlib.machinery.PathFinder.find_spec(top, path)
    return spec.origin if spec is not None and spec.has_location else None


def _origin(module: ModuleType) -> str | None:
    spec = getattr(module, "__spec__", None)
    return getattr(spec, "origin", None) or getattr(module, "__file__", None)


def _import_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def start_handler(module: ModuleType, function: str, context: Context) -> Entry:
    """Finds the handler in its module and has it load the model.

    A function is called once without data. Where the module has no such function, it defines
    exactly one class: that is instantiated and its `initialize` called.

    Raises:
        HandlerProblem: neither is there.
        Exception: whatever the handler raises; also in `initialize`, where MMS ignores it.
    """
    found = getattr(module, function, None)
    if found is None:
        return _start_class(_only_class(module, function), context)
    if isinstance(found, type):
        raise HandlerProblem(
            f"{module.__name__}.{function} is a class; name only its module, {module.__name__}, "
            "to serve with it."
        )
    if not callable(found):
        raise HandlerProblem(f"{module.__name__}.{function} is no function but {found!r:.80}.")
    entry: Entry = found
    entry(None, context)
    return entry


def _only_class(module: ModuleType, function: str) -> type:
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in classes)) or "none"
        raise HandlerProblem(
            f"The module {module.__name__!r} has no function {function!r}, and to serve with a "
            f"class it must define exactly one; it defines {names}."
        )
    return classes[0]


def _start_class(
    kind: type, context: Context, needed: Sequence[str] = ("initialize", "handle")
) -> Entry:
    service: Any = kind()
    for method in needed:
        if not callable(getattr(service, method, None)):
            raise HandlerProblem(f"The class {kind.__name__} has no method {method!r}.")
    if (initialize := getattr(service, "initialize", None)) is not None:
        initialize(context)
    entry: Entry = service.handle
    return entry


def why_not_fork() -> str:
    """Why no worker may be forked from this process; "" when one may."""
    threads = _native_threads()
    if threads > 1:
        return f"it has {threads} threads after the load"
    torch = sys.modules.get("torch")
    if torch is not None:
        try:
            if torch.cuda.is_initialized():
                return "it uses CUDA after the load"
        except Exception:  # a half-imported torch, or one without CUDA
            return ""
    return ""


def _native_threads() -> int:
    # As mmserve.platform has it, which would bring ctypes into every worker.
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1
