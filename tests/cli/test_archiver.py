"""`model-archiver` as its users run it."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mmserve.cli.archiver import main

SERVICE = "def handle(data, context):\n    return ['ok']\n"
PACKED = {"service.py", ".hidden-file", "dir/1.py", "dummy-artifacts.txt", "MAR-INF/MANIFEST.json"}
MANIFEST = """{
  "runtime": "python",
  "model": {
    "modelName": "m",
    "handler": "service:handle"
  },
  "modelServerVersion": "1.0",
  "implementationVersion": "1.0",
  "specificationVersion": "1.0"
}"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory with all that is left out, and what is not."""
    root = tmp_path / "model"
    for name in (
        "service.py",
        ".hidden-file",
        "dir/1.py",
        "dummy-artifacts.txt",
        "MANIFEST.json",
        "dir/MANIFEST.json",
        "old.mar",
        "dir/service.pyc",
        ".DS_Store",
        "__pycache__/service.cpython-311.pyc",
        "__MACOSX/x",
        ".git/config",
        "dir/.ipynb_checkpoints/x",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SERVICE)
    (root / "empty").mkdir()
    return root


def words(model: Path, export: Path, *more: str, name: str = "m") -> list[str]:
    paths = ["--model-path", str(model), "--export-path", str(export)]
    return [f"--model-name={name}", *paths, "--handler", "service:handle", *more]


def archive(model: Path, export: Path, *more: str, name: str = "m") -> int:
    export.mkdir(exist_ok=True)
    return main(words(model, export, *more, name=name))


def names(path: Path) -> set[str]:
    """What an archive of any form holds."""
    if path.is_dir():
        return {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}
    if path.suffix == ".mar":
        with zipfile.ZipFile(path) as packed:
            return set(packed.namelist())
    with tarfile.open(path) as packed_tar:
        found = packed_tar.getnames()
    assert all(name.startswith("m/") for name in found)
    return {name.removeprefix("m/") for name in found}


FORMS = [("default", "m.mar"), ("tgz", "m.tar.gz"), ("no-archive", "m")]


@pytest.mark.parametrize(("form", "file_name"), FORMS)
def test_every_form_holds_the_model_and_a_manifest(
    form: str, file_name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert archive(model, out, "--archive-format", form) == 0
    assert names(out / file_name) == PACKED
    assert [path.name for path in out.iterdir()] == [file_name]
    assert capsys.readouterr() == ("", "")


def test_the_manifest_has_multi_model_servers_keys_in_their_order(
    model: Path, tmp_path: Path
) -> None:
    assert archive(model, tmp_path / "out") == 0
    with zipfile.ZipFile(tmp_path / "out/m.mar") as packed:
        assert packed.read("MAR-INF/MANIFEST.json").decode() == MANIFEST
        assert packed.namelist()[-1] == "MAR-INF/MANIFEST.json"
        assert packed.read("service.py").decode() == SERVICE
        assert packed.testzip() is None


def test_the_runtime_is_written_down(model: Path, tmp_path: Path) -> None:
    assert archive(model, tmp_path / "out", "--runtime", "python3") == 0
    with zipfile.ZipFile(tmp_path / "out/m.mar") as packed:
        assert json.loads(packed.read("MAR-INF/MANIFEST.json"))["runtime"] == "python3"


@pytest.mark.parametrize(("form", "file_name"), FORMS)
def test_an_archive_is_replaced_only_by_force(
    form: str, file_name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    target = out / file_name
    assert archive(model, out, "--archive-format", form) == 0
    (model / "new.txt").write_text("new")
    assert archive(model, out, "--archive-format", form) == 1
    said = capsys.readouterr()
    assert said.err == (
        f"ERROR - {target} already exists.\n"
        "Please specify --force/-f option to overwrite the model archive output file.\n"
        "See -h/--help for more details.\n"
    )
    assert "new.txt" not in names(target)
    for flag in ("-f", "--f"):  # SageMaker's toolkits write it in the second way
        assert archive(model, out, "--archive-format", form, flag) == 0
        assert capsys.readouterr().err == f"WARNING - Overwriting {target} ...\n"
        assert names(target) == PACKED | {"new.txt"}
    assert [path.name for path in out.iterdir()] == [file_name]


@pytest.mark.parametrize("name", ["m/", "../m", "-m", "m m", "", "é", ".m", "m\n"])
def test_a_name_that_cannot_be_a_file_is_refused(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert archive(model, out, name=name) == 1
    assert capsys.readouterr().err == (
        "ERROR - Model name contains special characters.\n"
        "The allowed regular expression filter for model name is: ^[A-Za-z0-9][A-Za-z0-9_\\-.]*$\n"
    )
    assert list(out.iterdir()) == []


def test_directories_that_are_none_are_told(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archive(model / "service.py", tmp_path / "out") == 1
    assert "is not a valid directory. Point to a valid model-path" in capsys.readouterr().err
    assert main(words(model, tmp_path / "nowhere")) == 1
    assert "nowhere is not a directory. Point to a valid export-path" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--runtime", "java"], ["--archive-format", "rar"]])
def test_a_wrong_command_line_ends_with_2(flags: list[str], model: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags) if not flags else archive(model, tmp_path / "out", *flags)
    assert caught.value.code == 2


def test_conversion_is_refused_where_there_is_something_to_convert(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archive(model, tmp_path / "out", "-c") == 0
    (model / "net.onnx").write_text("x")
    assert archive(model, tmp_path / "out", "--convert", name="n") == 1
    assert "MXNet is not supported" in capsys.readouterr().err
    assert archive(model, tmp_path / "out", name="n") == 0
    assert "net.onnx" in names(tmp_path / "out/n.mar")


def test_weights_are_stored_and_text_is_deflated(model: Path, tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(1 << 20)
    files = {
        "weights.safetensors": bytes(1 << 20),
        "noise.dat": noise,
        "noise-small.bin": noise[:1000],
        "zeros.dat": bytes(1 << 20),
    }
    for name, content in files.items():
        (model / name).write_bytes(content)
    assert archive(model, tmp_path / "out") == 0
    with zipfile.ZipFile(tmp_path / "out/m.mar") as packed:
        stored = {i.filename for i in packed.infolist() if i.compress_type == zipfile.ZIP_STORED}
        assert stored == {"weights.safetensors", "noise.dat"}
        assert packed.read("noise.dat") == noise
        assert packed.read("zeros.dat") == bytes(1 << 20)


@pytest.mark.parametrize(("form", "file_name"), FORMS)
def test_an_archive_may_be_made_inside_its_own_model(
    form: str, file_name: str, model: Path
) -> None:
    for _ in range(2):
        assert archive(model, model, "--archive-format", form, "-f") == 0
        assert names(model / file_name) == PACKED


@pytest.mark.parametrize(("form", "file_name"), FORMS)
def test_linked_files_are_packed_as_files(
    form: str,
    file_name: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "blob").write_text("weights")
    (model / "weights.txt").symlink_to(tmp_path / "blob")
    (model / "loop").symlink_to(model)
    assert archive(model, tmp_path / "out", "--archive-format", form) == 0
    assert names(tmp_path / "out" / file_name) == PACKED | {"weights.txt"}
    assert "loop is a link to a directory and is left out" in capsys.readouterr().err


def test_a_script_stays_a_script(model: Path, tmp_path: Path) -> None:
    (model / "service.py").chmod(0o755)
    assert archive(model, tmp_path / "out") == 0
    assert archive(model, tmp_path / "out", "--archive-format", "no-archive") == 0
    with zipfile.ZipFile(tmp_path / "out/m.mar") as packed:
        assert packed.getinfo("service.py").external_attr >> 16 == stat.S_IFREG | 0o755
    assert stat.S_IMODE((tmp_path / "out/m/service.py").stat().st_mode) == 0o755


@pytest.mark.parametrize(("form", "file_name"), FORMS)
@pytest.mark.parametrize("force", [True, False])
def test_a_failure_leaves_what_was_there_and_nothing_else(
    form: str,
    file_name: str,
    force: bool,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    temp, out = tmp_path / "temp", tmp_path / "out"
    temp.mkdir()
    monkeypatch.setenv("TMPDIR", str(temp))
    if force:
        assert archive(model, out, "--archive-format", form) == 0
        before = names(out / file_name)
    (model / "zz").write_bytes(random.Random(0).randbytes(300_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert archive(model, out, "--archive-format", form, *(["-f"] if force else [])) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in capsys.readouterr().err
    assert list(temp.iterdir()) == []
    assert [path.name for path in out.iterdir()] == ([file_name] if force else [])
    if force:
        assert names(out / file_name) == before


def test_a_file_that_cannot_be_read_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "gone").symlink_to("nowhere")
    assert archive(model, tmp_path / "out") == 1
    assert capsys.readouterr().err == f"ERROR - {model}/gone: No such file or directory\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_pipe_in_the_model_is_an_error(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(model / "pipe")
    assert archive(model, tmp_path / "out") == 1
    assert "pipe is neither a file nor a directory" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(sent: signal.Signals, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    # Larger than what can be packed before the signal arrives; sparse, so that it costs nothing.
    with (model / "weights.txt").open("wb") as file:
        file.truncate(1 << 36)
    command = [sys.executable, "-m", "mmserve.cli.archiver", *words(model, out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for_entry(out, process)
        process.send_signal(sent)
        _, said = process.communicate()
    assert (process.returncode, said) == (128 + sent, "ERROR - Interrupted; nothing was written.\n")
    assert list(out.iterdir()) == []


def wait_for_entry(folder: Path, process: subprocess.Popen[str]) -> None:
    """Returns once something lies in the folder."""
    while not any(folder.iterdir()):
        assert process.poll() is None, "it ended by itself"
