"""A worker process from its first word to its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mmserve.wire.framing import PREFIX
from mmserve.wire.messages import Loaded
from tests.runtime.workers import FORK, FRESH, TEMPLATE, Process, Request

Model = Callable[[Mapping[str, str]], Path]
Start = Callable[..., Process]
Serve = Callable[..., Process]

OK = "def handle(data, context): return ['ok']"


@pytest.mark.parametrize("command, kind", [(FRESH, "fresh"), (["-c", FORK], "fork")])
def test_it_greets_loads_serves_and_ends_when_the_front_lets_go(
    start: Start, model: Model, command: list[str], kind: str
) -> None:
    process = start(command)
    assert process.hello().start == kind
    loaded = process.load(model({"service.py": OK}))
    assert isinstance(loaded, Loaded)
    assert (loaded.can_fork, loaded.why_not) == (True, "")
    assert loaded.load_s > 0
    assert process.ask().text == "ok"
    assert process.end() == 0
    assert process.err == ""


@pytest.mark.parametrize("words", [[], ["--fd"], ["--fd", "x"], ["--other", "3"]])
def test_a_wrong_command_line_says_what_is_right(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "mmserve.runtime", *words], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "usage: python -I -m mmserve.runtime --fd N" in done.stderr


def test_a_front_that_is_gone_before_the_load_is_no_error(start: Start) -> None:
    process = start()
    process.hello()
    assert process.end() in (0, 1)
    assert process.err == ""


def test_what_is_no_frame_ends_the_worker_with_a_word(serve: Serve) -> None:
    worker = serve("return ['ok']")
    worker.socket.sendall(PREFIX.pack(2**32 - 1, 0))
    assert worker.recv() is None
    assert worker.exit_code() == 1
    assert "WireError" in worker.err


def test_batches_sent_in_advance_are_answered_in_order(serve: Serve) -> None:
    worker = serve("return [body]")
    ids = [worker.send(Request(b"%d" % number)) for number in range(20)]
    answered = [worker.replies() for _ in ids]
    assert [message.batch_id for message, _ in answered] == ids
    assert [answers[0].text for _, answers in answered] == [str(n) for n in range(20)]


# Streams and logging


@pytest.mark.parametrize("command", [FRESH, ["-c", FORK]])
def test_printing_any_text_or_bytes_does_no_harm_in_a_c_locale(
    start: Start, model: Model, command: list[str]
) -> None:
    source = r"""
        import os, sys
        def handle(data, context):
            if data:
                print('好', '\ud800')
                print(b'\xff')
                print('also 好', file=sys.stderr)
                os.write(1, b'\xff\xfe\n')
            return ['ok']
    """
    process = start(command, env={"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"})
    process.hello()
    assert isinstance(process.load(model({"service.py": source})), Loaded)
    assert process.ask().text == "ok"
    process.end()
    assert process.out == "好 \\ud800\nb'\\xff'\n\udcff\udcfe\n"
    assert process.err == "also 好\n"


def test_a_line_is_out_before_the_reply(serve: Serve) -> None:
    worker = serve("print('a line'); print('no line', end=''); return ['ok']")
    worker.ask()
    assert worker.out == "a line\n"
    worker.end()
    assert worker.out == "a line\nno line"


def test_the_root_logger_says_info_and_above_to_stdout(serve: Serve) -> None:
    worker = serve(
        """
        logging.debug('debug')
        logging.info('info')
        logging.getLogger('a.b').warning('warning')
        return ['ok']
        """,
        setup="import logging",
    )
    worker.ask()
    assert (worker.out, worker.err) == ("info\nwarning\n", "")


def test_closed_streams_do_not_fail_a_prediction(serve: Serve) -> None:
    worker = serve("sys.stderr = sys.stdout = None; raise ValueError", setup="import sys")
    for _ in range(2):
        assert worker.ask().error == (503, "Prediction failed")
    assert worker.end() == 0


# Its end


def test_what_is_registered_for_the_end_runs(serve: Serve, tmp_path: Path) -> None:
    worker = serve(
        "return ['ok']",
        setup=f"""
            import atexit, pathlib, tempfile, threading, time
            folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r}, prefix='theirs')
            atexit.register(print, 'at exit')
            stop = threading.Event()
            def work():
                stop.wait(0.05)
                print('thread')
            def handle_later():
                threading.Thread(target=work).start()
            atexit.register(pathlib.Path({str(tmp_path / "left")!r}).touch)
        """,
    )
    worker.ask()
    assert list(tmp_path.glob("theirs*"))
    assert worker.end() == 0
    assert "at exit" in worker.out
    assert (tmp_path / "left").exists()
    assert not list(tmp_path.glob("theirs*"))


@pytest.mark.parametrize(
    "busy", ["threading.Thread(target=time.sleep, args=(600,)).start()", "atexit.register(spin)"]
)
def test_what_would_never_end_is_ended_and_the_log_shows_it(serve: Serve, busy: str) -> None:
    worker = serve(
        "return ['ok']",
        setup=f"""
            import atexit, threading, time
            def spin():
                while True: pass
            {busy}
        """,
    )
    worker.ask()
    assert worker.end() == 1
    assert "Timeout" in worker.err
    assert "service.py" in worker.err or "threading.py" in worker.err


def test_the_end_of_the_front_is_seen_while_a_reply_is_sent(serve: Serve) -> None:
    worker = serve("return [b'x' * (1 << 24)]", max_response_size=1 << 30)
    worker.send(Request())
    assert worker.socket.recv(1) != b""
    assert worker.end() == 0


def test_children_of_a_handler_do_not_hold_the_wire(serve: Serve) -> None:
    worker = serve(
        """
        child = os.fork()
        if child == 0:
            time.sleep(600)
        print(child)
        os.kill(os.getpid(), 9)
        """,
        setup="import os, time",
    )
    worker.send(Request())
    assert worker.recv() is None, "end-of-file, though a child lives"
    assert worker.exit_code() == -signal.SIGKILL
    os.kill(int(worker.out), signal.SIGKILL)


def test_a_child_that_returns_from_the_handler_answers_nobody(serve: Serve) -> None:
    worker = serve(
        "pid = os.fork()\nif pid: os.waitpid(pid, 0)\nreturn [str(pid > 0)]", setup="import os"
    )
    for _ in range(3):
        assert worker.ask().text == "True"
    assert worker.end() == 0


def test_signals_are_at_their_defaults_in_a_fork(start: Start, model: Model) -> None:
    preamble = """
import signal
for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
"""
    source = """
        import signal
        def handle(data, context):
            names = ('SIGTERM', 'SIGCHLD', 'SIGHUP')
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            kinds = [signal.getsignal(getattr(signal, name)) == signal.SIG_DFL for name in names]
            return [[*kinds, signal.getsignal(signal.SIGINT).__name__, len(mask)]]
    """
    process = start(["-c", preamble + FORK])
    process.hello()
    assert isinstance(process.load(model({"service.py": source})), Loaded)
    assert json.loads(process.ask().body) == [True, True, True, "default_int_handler", 0]


def test_forks_do_not_share_random_numbers(start: Start, model: Model) -> None:
    pytest.importorskip("numpy")
    source = """
        import random
        import numpy
        def handle(data, context):
            return [[random.random(), numpy.random.rand()]]
    """
    directory = model({"service.py": source})
    twice = """
import os, random, sys
import numpy.random
from mmserve.runtime.worker import run_worker
first, second = map(int, sys.argv[1].split(","))
for mine, other in ((first, second), (second, first)):
    if os.fork() == 0:
        os.close(other)
        run_worker(mine, start="fork")
os.close(first)
os.close(second)
os.wait()
os.wait()
"""
    process = start(["-c", twice], more_wires=1)
    seen = []
    for wire in (process, *process.others):
        wire.hello()
        assert isinstance(wire.load(directory), Loaded)
        seen.append(json.loads(wire.ask().body))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


# Templates


def test_forks_of_a_template_have_the_model_and_their_own_order(start: Start, model: Model) -> None:
    source = """
        import os
        os.environ['SET_WHILE_LOADING'] = 'kept'
        loads = []
        def handle(data, context):
            if data is None:
                loads.append(os.getpid())
                return
            properties = context.system_properties
            return [[len(loads), loads[0] == os.getpid(), properties['gpu_id'],
                     properties['batch_size'], os.environ.get('SET_WHILE_LOADING')]]
    """
    directory = model({"service.py": source})
    process = start(["-c", TEMPLATE], more_wires=2)
    assert process.hello().start == "template"
    loaded = process.load(directory, batch_size=4, gpu_id=0)
    assert isinstance(loaded, Loaded)
    assert loaded.can_fork
    pids = set()
    for number, wire in enumerate(process.others):
        hello = wire.hello()
        assert hello.start == "template"
        pids.add(hello.pid)
        assert isinstance(wire.load(directory, batch_size=4, gpu_id=number), Loaded)
        assert json.loads(wire.ask().body) == [1, False, number, 4, "kept"]
    assert len(pids) == 2
    assert process.end() == 0


def test_a_process_with_a_second_thread_may_not_be_forked(start: Start, model: Model) -> None:
    source = """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        def handle(data, context): pass
    """
    process = start()
    process.hello()
    loaded = process.load(model({"service.py": source}))
    assert isinstance(loaded, Loaded)
    assert (loaded.can_fork, loaded.why_not) == (False, "it has 2 threads after the load")


def test_a_process_that_uses_cuda_may_not_be_forked(start: Start, model: Model) -> None:
    source = """
        import sys, types
        torch = sys.modules['torch'] = types.ModuleType('torch')
        torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
        def handle(data, context): pass
    """
    process = start()
    process.hello()
    loaded = process.load(model({"service.py": source}))
    assert isinstance(loaded, Loaded)
    assert (loaded.can_fork, loaded.why_not) == (False, "it uses CUDA after the load")


# Weight


def test_a_worker_holds_the_standard_library_msgspec_runtime_and_wire(
    start: Start, model: Model
) -> None:
    source = """
        import sys
        def handle(data, context):
            if data is None: return
            return [sorted({
                name if name.startswith('mmserve.') and name.count('.') == 1
                else name.partition('.')[0] for name in sys.modules
                if name.partition('.')[0] not in sys.stdlib_module_names
            })]
    """
    process = start()
    process.hello()
    assert isinstance(process.load(model({"service.py": source})), Loaded)
    held = set(json.loads(process.ask().body))
    # The virtual environment's own start-up hooks are not ours, nor is measuring coverage.
    hooks = {"_distutils_hack", "coverage", "a1_coverage", "sitecustomize", "typing_extensions"}
    hooks |= {"$coverage", "__mp_main__"}
    hooks |= {name for name in held if name.startswith("_sysconfigdata")}
    assert held - hooks <= {
        "__main__",
        "mmserve",
        "mmserve.errors",
        "mmserve.runtime",
        "mmserve.wire",
        "msgspec",
        "service",
    }
    heavy = "{'asyncio', 'ctypes', 'pathlib', 'psutil', 'argparse'} & set(sys.modules)"
    check = f"import sys, mmserve.runtime.worker; assert not {heavy}, {heavy}"
    unmeasured = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")}
    done = subprocess.run([sys.executable, "-I", "-c", check], env=unmeasured, check=False)
    assert done.returncode == 0
