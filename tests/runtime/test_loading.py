"""How a worker finds its handler, and what it says when there is none; real processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mmserve.wire.messages import Loaded, LoadFailed
from tests.runtime.workers import FORK, Process

Model = Callable[[Mapping[str, str]], Path]
Start = Callable[..., Process]

FUNCTION = """
    loads = []
    def handle(data, context):
        if data is None:
            loads.append(context.model_name)
            return 'ignored'
        return [f'{__name__} {loads}']
"""
CLASS = """
    class Service:
        def initialize(self, context):
            self.name = context.model_name
        def handle(self, data, context):
            return [f'{type(self).__name__} {self.name}']
"""
TEMPLATE = """
    class Service:
        initialized = False
        def initialize(self, context):
            self.initialized = True
        def handle(self, data, context):
            return ['template']
    _service = Service()
    def handle(data, context):
        if not _service.initialized:
            _service.initialize(context)
        if data is None:
            return None
        return _service.handle(data, context)
"""


def load(start: Start, directory: Path, handler: str, **options: object) -> Process | LoadFailed:
    """The worker once it has loaded, or its refusal."""
    process = start(**options)
    process.hello()
    answer = process.load(directory, handler)
    if isinstance(answer, Loaded):
        return process
    assert process.exit_code() == 1
    return answer


@pytest.mark.parametrize(
    "file, handler, text",
    [
        ("service.py", "service:handle", "service ['m']"),
        ("service.py", "service", "service ['m']"),
        ("service.py", "service.py:handle", "service ['m']"),
        ("service.py", r"C:\models\service.py:handle", "service ['m']"),
        ("lib/service.py", "lib/service.py:handle", "service ['m']"),
        ("code/service.py", "service:handle", "service ['m']"),
        ("handler-v2.py", "handler-v2.py:handle", "handler-v2 ['m']"),
        ("handler.v2.py", "handler.v2.py:handle", "handler.v2 ['m']"),
        ("pkg/service.py", "pkg.service:handle", "pkg.service ['m']"),
        ("context.py", "context:handle", "context ['m']"),
        ("utils.py", "utils:handle", "utils ['m']"),
        ("metrics.py", "metrics", "metrics ['m']"),
        ("server.py", "server", "server ['m']"),
        ("worker.py", "worker", "worker ['m']"),
    ],
)
def test_a_function_is_found_and_called_once_without_data(
    start: Start, model: Model, file: str, handler: str, text: str
) -> None:
    process = load(start, model({file: FUNCTION}), handler)
    assert isinstance(process, Process), process
    assert process.ask().text == text


def test_an_absolute_handler_file_works(start: Start, model: Model, tmp_path: Path) -> None:
    directory = model({"x": ""})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "service.py").write_text(
        "import beside\ndef run(data, context): return [beside.WORD]"
    )
    (elsewhere / "beside.py").write_text("WORD = 'beside'")
    process = load(start, directory, f"{elsewhere}/service.py:run")
    assert isinstance(process, Process), process
    assert process.ask().text == "beside"


@pytest.mark.parametrize(
    "source, handler, text",
    [
        (CLASS, "service:handle", "Service m"),
        (CLASS, "service", "Service m"),
        (CLASS, "service:other", "Service m"),
        (CLASS + "\n    from json import JSONEncoder", "service", "Service m"),
        (TEMPLATE, "service:handle", "template"),
    ],
)
def test_a_class_serves_where_the_function_is_missing(
    start: Start, model: Model, source: str, handler: str, text: str
) -> None:
    process = load(start, model({"service.py": source}), handler)
    assert isinstance(process, Process), process
    assert process.ask().text == text


def test_a_package_may_import_relatively(start: Start, model: Model) -> None:
    directory = model(
        {
            "pkg/__init__.py": "",
            "pkg/words.py": "WORD = 'relative'",
            "pkg/inner/__init__.py": "",
            "pkg/inner/service.py": "from ..words import WORD\n"
            "def handle(data, context): return [WORD]",
        }
    )
    process = load(start, directory, "pkg.inner.service:handle")
    assert isinstance(process, Process), process
    assert process.ask().text == "relative"


@pytest.mark.parametrize(
    "files, handler, cause",
    [
        ({"service.py": "def f(): pass"}, "service:handle", "has no function 'handle', and to"),
        ({"service.py": "class A: pass\nclass B: pass"}, "service", "it defines A, B."),
        ({"service.py": "class A: pass"}, "service", "The class A has no method 'initialize'."),
        (
            {"service.py": "class A:\n    def initialize(self, context): pass"},
            "service",
            "The class A has no method 'handle'.",
        ),
        ({"service.py": "handle = 5"}, "service", "service.handle is no function but 5."),
        (
            {"service.py": "class A: pass"},
            "service:A",
            "service.A is a class; name only its module, service, to serve with it.",
        ),
        ({"service.py": ""}, "nope:handle", "ModuleNotFoundError: No module named 'nope'"),
        ({"service.py": "import nope"}, "service", "ModuleNotFoundError: No module named 'nope'"),
        ({"service.py": "def :"}, "service", "SyntaxError: invalid syntax (service.py, line 1)"),
        ({"service.py": "raise ValueError('a\\n b')"}, "service", "ValueError: a b"),
        ({"service.py": "raise ValueError(chr(0xd800))"}, "service", "ValueError: \\ud800"),
        ({"service.py": "import sys; sys.exit(0)"}, "service", "SystemExit: 0"),
        ({"service.py": "raise KeyboardInterrupt"}, "service", "KeyboardInterrupt"),
        ({"service.py": FUNCTION}, "service:", "names no function"),
        ({"service.py": FUNCTION}, ":handle", "names no module"),
        ({"service.py": FUNCTION}, "a:b:c", "ModuleNotFoundError: No module named 'a:b'"),
        ({"json.py": FUNCTION}, "json:handle", "json.py has the name of a module of Python itself"),
        ({"msgspec.py": FUNCTION}, "msgspec", "has the name of a module of a library"),
        (
            {"service.py": "import mms.model_service.mxnet_model_service"},
            "service",
            "ImportError: Services of the 0.x kind (mms.model_service) need MXNet",
        ),
    ],
)
def test_a_handler_that_cannot_be_had_fails_the_load_and_says_why(
    start: Start, model: Model, files: dict[str, str], handler: str, cause: str
) -> None:
    failed = load(start, model(files), handler)
    assert isinstance(failed, LoadFailed)
    assert cause in failed.cause
    assert "\n" not in failed.cause
    assert not failed.out_of_memory


@pytest.mark.parametrize("error, is_memory", [("ValueError('x')", False), ("MemoryError()", True)])
@pytest.mark.parametrize(
    "source",
    [
        "def handle(data, context): raise {}",
        "class A:\n def initialize(self, context): raise {}\n def handle(self, data, context): 0",
        "try:\n raise {}\nexcept Exception as error:\n raise RuntimeError('wrapped') from error",
    ],
)
def test_an_exception_while_loading_fails_the_load(
    start: Start, model: Model, source: str, error: str, is_memory: bool
) -> None:
    failed = load(start, model({"service.py": source.format(error)}), "service")
    assert isinstance(failed, LoadFailed)
    assert failed.out_of_memory == is_memory
    assert error.partition("(")[0] in failed.trace
    assert 'service.py", line' in failed.trace
    assert "mmserve/runtime" not in failed.trace


def test_a_directory_that_is_gone_fails_the_load(start: Start, tmp_path: Path) -> None:
    failed = load(start, tmp_path / "gone", "service")
    assert isinstance(failed, LoadFailed)
    assert failed.cause.startswith("FileNotFoundError")


@pytest.mark.parametrize("command", [["-m", "mmserve.runtime", "--fd"], ["-c", FORK]])
def test_code_runs_where_it_would_under_multi_model_server(
    start: Start, model: Model, tmp_path: Path, command: list[str]
) -> None:
    directory = model(
        {
            "lib/service.py": """
                import json, logging, os, random, subprocess, sys
                import first, second, third, fourth
                def handle(data, context):
                    if data is None: return
                    child = [sys.executable, '-Pc', 'import second; print(second.WORD)']
                    return [{
                        'cwd': os.getcwd(), 'argv': sys.argv[1:],
                        'path': sys.path[:5], 'PYTHONPATH': os.environ['PYTHONPATH'],
                        'words': [m.WORD for m in (first, second, third, fourth)],
                        'child': subprocess.check_output(child, text=True).strip(),
                        'omp': os.environ['OMP_NUM_THREADS'],
                        'mxnet': os.environ['MXNET_USE_OPERATOR_TUNING'],
                        'decode': os.environ['MMS_DECODE_INPUT_REQUEST'],
                        'root': logging.getLogger().level,
                    }]
            """,
            "lib/first.py": "WORD = 'handler'",
            "first.py": "WORD = 'wrong'",
            "second.py": "WORD = 'wrong'",
            "third.py": "WORD = 'model'",
            "code/third.py": "WORD = 'wrong'",
            "code/fourth.py": "WORD = 'code'",
        }
    )
    inherited = tmp_path / "inherited"
    inherited.mkdir()
    (inherited / "second.py").write_text("WORD = 'PYTHONPATH'")
    process = start(command, env={"PYTHONPATH": str(inherited), "OMP_NUM_THREADS": "3"})
    process.hello()
    assert isinstance(process.load(directory, "lib/service.py:handle"), Loaded)
    seen = json.loads(process.ask().body)
    path = [str(directory / "lib"), str(inherited), str(directory), str(directory / "code")]
    assert seen.pop("path")[:4] == path
    assert seen == {
        "cwd": str(directory),
        "argv": [],
        "PYTHONPATH": os.pathsep.join(path),
        "words": ["handler", "PYTHONPATH", "model", "code"],
        "child": "PYTHONPATH",
        "omp": "3",
        "mxnet": "0",
        "decode": "true",
        "root": 20,
    }


def test_nothing_of_the_server_has_a_bare_name(start: Start, model: Model) -> None:
    names = ["service", "context", "utils", "metrics", "worker", "runtime", "wire", "compat"]
    source = f"""
        import importlib.util
        def handle(data, context):
            return [[name for name in {names} if importlib.util.find_spec(name)]]
    """
    process = load(start, model({"handler.py": source}), "handler")
    assert isinstance(process, Process), process
    assert process.ask().text == "[]"


def test_an_archive_may_bring_its_own_mms(start: Start, model: Model) -> None:
    directory = model(
        {
            "mms/__init__.py": "",
            "mms/service.py": """
                class PredictionException(Exception):
                    def __init__(self, message, error_code=500):
                        self.message, self.error_code = message, error_code
            """,
            "service.py": """
                from mms.service import PredictionException
                def handle(data, context):
                    if data: raise PredictionException('theirs', 418)
            """,
        }
    )
    process = load(start, directory, "service")
    assert isinstance(process, Process), process
    assert process.ask().error == (418, "theirs")


def test_all_that_handlers_import_from_mms_is_there(start: Start, model: Model) -> None:
    source = """
        import json, sys
        import mms
        from mms.context import Context, RequestProcessor
        from mms.metrics import system_metrics
        from mms.metrics.dimension import Dimension
        from mms.metrics.metric import Metric
        from mms.metrics.metric_encoder import MetricEncoder
        from mms.metrics.metrics_store import MetricsStore
        from mms.metrics.unit import Units
        from mms.service import PredictionException, Service, emit_metrics
        from mms.utils.timeit_decorator import timeit
        from mms.version import __version__

        @timeit
        def timed(x):
            return x + 1

        def handle(data, context):
            if data is None:
                assert isinstance(context, Context)
                assert isinstance(context.metrics, MetricsStore)
                context.metrics.add_counter('Loads', 1)
                return
            assert isinstance(context.request_processor[0], RequestProcessor)
            system_metrics.collect_all(sys.modules['mms.metrics.system_metrics'])
            emit_metrics([Metric('Mine', 1, 'ms', [Dimension('k', 'v')])])
            own = Context('n', '/d', None, 3, None, '9')
            service = Service('n', '/d', None, handle, 0, 2)
            return [[mms.__version__, __version__, timed(1), own.system_properties['batch_size'],
                     service.context.system_properties['gpu_id']]]
    """
    process = start()
    process.hello()
    loaded = process.load(model({"service.py": source}))
    assert isinstance(loaded, Loaded), loaded
    assert [line.partition("|")[0] for line in loaded.metrics] == ["Loads.Count:1"]
    assert json.loads(process.ask().body) == ["1.1.11", "1.1.11", 2, 3, 0]
    process.end()
    printed = [line for line in process.out.splitlines() if line.startswith("[METRICS]")]
    assert [line.partition(".")[0] for line in printed] == [
        "[METRICS]CPUUtilization",
        "[METRICS]DiskAvailable",
        "[METRICS]DiskUsage",
        "[METRICS]DiskUtilization",
        "[METRICS]MemoryAvailable",
        "[METRICS]MemoryUsed",
        "[METRICS]MemoryUtilization",
        "[METRICS]Mine",
    ]
    assert "timed took " in process.out
