"""`mmserve run`: a model in a child of the command, as it would be in a worker."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCE = """
import os, sys, time

def handle(data, context):
    if data is None:
        print("I load")
        return None
    bodies = [row["body"] for row in data]
    if "fail" in bodies:
        secret = 40 + 2
        raise ValueError("that was asked for")
    if "leave" in bodies:
        os._exit(0)
    if "short" in bodies:
        return []
    for at, body in enumerate(bodies):
        context.set_response_status(int(body) if str(body).isdigit() else 200, idx=at)
    context.set_response_header(0, "x-batch", str(len(data)))
    context.metrics.add_counter("seen", len(data))
    return [{"got": str(body), "type": context.get_request_header(at, "content-type"),
             "who": context.get_request_header(at, "x-who")} for at, body in enumerate(bodies)]
"""
MANIFEST = {"model": {"modelName": "m", "handler": "service:handle"}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "MAR-INF").mkdir(parents=True)
    (directory / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(MANIFEST))
    (directory / "service.py").write_text(SOURCE)
    for name, text in {"a.txt": "a", "b.json": "[1]", "fail.txt": "fail", "bad.json": "{"}.items():
        (tmp_path / name).write_text(text)
    return directory


def run(model: Path, *flags: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mmserve.cli.main", "run", str(model), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, input=stdin, cwd=model.parent, timeout=60
    )


def inputs(*names: str) -> Sequence[str]:
    return [flag for name in names for flag in ("--input", name)]


def test_an_answer_goes_to_standard_output_and_all_else_to_standard_error(model: Path) -> None:
    done = run(model, *inputs("a.txt"), "--header", "X-Who: me")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"got": "a", "type": "text/plain", "who": "me"}
    lines = done.stderr.splitlines()
    assert lines[0] == "I load"
    assert lines[1].startswith("load: ") and " s, " in lines[1]
    if Path("/proc/self/smaps_rollup").exists():
        assert "MB private (" in lines[1] and "MB private (" in lines[2]
    assert lines[2].startswith("a.txt: ") and " ms, " in lines[2]
    assert lines[3].startswith("metric: seen.Count:1|")
    assert lines[4:7] == ["a.txt: 200 OK", "x-batch: 1", "content-type: application/json"]


def test_an_archive_is_unpacked_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    archive, place = tmp_path / "m.mar", tmp_path / "place"
    place.mkdir()
    with zipfile.ZipFile(archive, "w") as packed:
        for path in model.rglob("*"):
            packed.write(path, path.relative_to(model))
    command = [sys.executable, "-m", "mmserve.cli.main", "run", str(archive), "--input", "a.txt"]
    environ = {**os.environ, "TMPDIR": str(place)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["got"] == "a"
    assert list(place.iterdir()) == []


def test_a_batch_is_one_call_and_a_bad_body_does_not_reach_it(model: Path) -> None:
    done = run(model, *inputs("a.txt", "bad.json", "b.json"), "--batch")
    assert done.returncode == 1
    assert "batch of 3: " in done.stderr
    assert "x-batch: 2" in done.stderr
    assert "a.txt: 200 OK" in done.stderr and "b.json: 200 OK" in done.stderr
    assert "bad.json: 400 Bad Request" in done.stderr
    assert '"got": "[1]"' in done.stdout and "not valid JSON" in done.stdout


def test_without_a_batch_each_input_is_a_call(model: Path) -> None:
    done = run(model, *inputs("a.txt", "fail.txt", "b.json"))
    assert done.returncode == 1
    assert done.stderr.count("x-batch: 1") == 2
    assert "fail.txt: 503 Service Unavailable" in done.stderr
    assert "raise ValueError(" in done.stderr and "ValueError: that was asked for" in done.stderr
    assert "foreground" not in done.stderr


def test_bodies_go_to_the_files_named(model: Path, tmp_path: Path) -> None:
    out = [str(tmp_path / "1.out"), str(tmp_path / "2.out")]
    done = run(model, *inputs("a.txt", "b.json"), "--output", out[0], "--output", out[1])
    assert (done.returncode, done.stdout) == (0, "")
    got = [json.loads(Path(name).read_text())["got"] for name in out]
    assert got == ["a", "[1]"]


def test_the_type_can_be_chosen_and_standard_input_read(model: Path) -> None:
    done = run(model, *inputs("-"), "--content-type", "application/json", stdin="[1, 2]")
    answer = json.loads(done.stdout)
    assert (answer["got"], answer["type"]) == ("[1, 2]", "application/json")


@pytest.mark.parametrize(("status", "code"), [("201", 0), ("399", 0), ("400", 1), ("503", 1)])
def test_the_exit_code_tells_of_statuses_from_400_on(
    model: Path, tmp_path: Path, status: str, code: int
) -> None:
    (tmp_path / "s.txt").write_text(status)
    assert run(model, *inputs("s.txt")).returncode == code


def test_a_handler_that_ends_its_process_is_told_of(model: Path, tmp_path: Path) -> None:
    (tmp_path / "leave.txt").write_text("leave")
    done = run(model, *inputs("a.txt", "leave.txt", "b.json"))
    assert done.returncode == 1
    assert "Worker died. Its process ended with status 0." in done.stdout
    assert "1 more inputs were not sent." in done.stderr


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs smaps_rollup")
def test_mapped_files_are_not_private_even_when_just_written(model: Path) -> None:
    (model / "weights").write_bytes(b"w" * (64 << 20))
    (model / "service.py").write_text(
        "import mmap\n"
        "file = open('weights', 'rb')\n"
        "weights = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)\n"
        "def handle(data, context):\n"
        "    return data and [str(weights.find(b'x'))]\n"
    )
    done = run(model, *inputs("a.txt"))
    assert done.stdout == "-1"
    (grown,) = re.findall(r"a.txt: .* MB private \(([-+.0-9]+) MB\)", done.stderr)
    assert float(grown) < 16


def test_a_signal_ends_the_handler_and_removes_what_was_unpacked(
    model: Path, tmp_path: Path
) -> None:
    (model / "service.py").write_text(
        "import os, time\ndef handle(data, context):\n"
        "    if data:\n        print(os.getpid(), flush=True)\n        time.sleep(600)\n"
    )
    archive, place = tmp_path / "m.mar", tmp_path / "place"
    place.mkdir()
    with zipfile.ZipFile(archive, "w") as packed:
        packed.write(model / "service.py", "service.py")
    words = ["run", str(archive), "--handler", "service:handle", "--input", str(tmp_path / "a.txt")]
    with subprocess.Popen(
        [sys.executable, "-m", "mmserve.cli.main", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(place)},
    ) as command:
        assert command.stderr is not None
        pid = next(int(line) for line in command.stderr if line.strip().isdigit())
        command.terminate()
        assert command.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(place.iterdir()) == []


def test_a_handler_that_does_not_load_shows_why(model: Path) -> None:
    (model / "service.py").write_text("import nowhere_to_be_found\n")
    done = run(model, *inputs("a.txt"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "import nowhere_to_be_found" in done.stderr
    assert "load: 500 Internal Server Error: Failed to start workers: ModuleNot" in done.stderr


def test_the_debugger_opens_where_a_prediction_raises(model: Path) -> None:
    done = run(model, *inputs("fail.txt"), "--pdb", stdin="p secret\nq\n")
    assert done.returncode == 1
    assert "service.py(11)handle()" in done.stderr
    assert "(Pdb) 42" in done.stderr


def test_the_debugger_opens_where_a_load_raises(model: Path) -> None:
    (model / "service.py").write_text("found = 6 * 7\nraise OSError('no')\n")
    done = run(model, *inputs("a.txt"), "--pdb", stdin="p found\nq\n")
    assert done.returncode == 1
    assert "(Pdb) 42" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--input", "nowhere.txt"],
        ["--input", "a.txt", "--output", "x", "--output", "y"],
        ["--input", "-", "--pdb"],
        ["--input", "-", "--input", "-"],
        [],
    ],
)
def test_a_wrong_command_line_is_2(model: Path, flags: list[str]) -> None:
    done = run(model, *flags)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_no_model_is_2_and_a_broken_one_is_1(model: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "none.mar", *inputs("a.txt")).returncode == 2
    (tmp_path / "text.mar").write_text("no archive")
    done = run(tmp_path / "text.mar", *inputs("a.txt"))
    assert done.returncode == 1
    assert "It is not a valid archive" in done.stderr
