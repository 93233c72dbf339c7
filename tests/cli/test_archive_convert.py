"""`mmserve archive convert`: files of torch.save become safetensors, and nothing in them is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import pytest

from mmserve.cli import archive_convert, convert_weights
from mmserve.cli.archive_convert import new_name

pytest.importorskip("safetensors")
torch = pytest.importorskip("torch")
from safetensors import safe_open  # noqa: E402 - behind the skip
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.torch

HANDLER = "def handle(data, context):\n    return data and [None]\n"

# fmt: off
TYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
)
# fmt: on


class Trap:
    """Leaves a file behind where its pickle is run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "MAR-INF").mkdir(parents=True)
    named = {"modelName": "m", "handler": "own.py", "serializedFile": "net.pth"}
    manifest = {"model": named, "archiverVersion": "0.12.0"}
    (directory / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    (directory / "own.py").write_text(HANDLER)
    return directory


def convert(*words: str | Path) -> int:
    """As `mmserve archive convert` does it, in this process; its child is a real one."""
    return archive_convert.main([str(word) for word in words])


def manifest_of(directory: Path) -> dict[str, object]:
    root = json.loads((directory / "MAR-INF" / "MANIFEST.json").read_text())
    found: dict[str, object] = root["model"]
    return found


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def below(directory: Path) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(path.relative_to(directory).as_posix() for path in files)


def test_every_type_shape_and_layout_comes_out_as_it_was(model: Path, tmp_path: Path) -> None:
    state = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in TYPES}
    state |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "slice": torch.arange(100)[10:20],
        "expanded": torch.ones(1).expand(4, 5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, model / "net.pth")
    out = tmp_path / "out"
    assert convert(model, out) == 0
    assert below(out) == ["MAR-INF/MANIFEST.json", "net.safetensors", "own.py"]
    assert manifest_of(out)["serializedFile"] == "net.safetensors"
    assert manifest_of(model)["serializedFile"] == "net.pth"
    found = load_file(out / "net.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.detach()), name
    with safe_open(out / "net.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def one(content: object, tmp_path: Path, *, is_new: bool = True) -> tuple[str, dict[str, object]]:
    """One file converted in this process: what is said of it, and what comes out."""
    source, target = tmp_path / "net.pth", tmp_path / "net.safetensors"
    torch.save(content, source, _use_new_zipfile_serialization=is_new)
    return convert_weights.convert(str(source), str(target)), load_file(target)


def test_tensors_that_share_memory_are_written_for_each_name(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    said, found = one({"a": whole, "b": whole, "part": whole[2:4]}, tmp_path)
    assert torch.equal(found["a"], whole) and torch.equal(found["b"], whole)
    assert found["part"].tolist() == [2.0, 3.0]
    assert said.startswith("shared tensors are written out for each name: b with a, part with a")


def test_parts_of_one_storage_are_not_shared(tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    assert one({"a": whole[:4], "b": whole[4:]}, tmp_path)[0] == ""


def test_a_file_of_torch_before_1_6_is_converted(tmp_path: Path) -> None:
    _, found = one({"w": torch.arange(4.0)}, tmp_path, is_new=False)
    assert found["w"].tolist() == [0, 1, 2, 3]


def test_tensors_that_are_not_dense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(convert_weights.Refused, match="w is no dense tensor"):
        one({"w": torch.eye(2).to_sparse()}, tmp_path)
    assert entries(tmp_path) == ["net.pth"]


@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "before 1.6"])
def test_a_pickle_that_needs_code_is_refused_by_name_and_not_run(
    is_new: bool, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trap = tmp_path / "trap"
    content = {"w": torch.ones(2), "x": Trap(trap)}
    torch.save(content, model / "net.pth", _use_new_zipfile_serialization=is_new)
    assert convert(model, tmp_path / "out.mar") == 1
    said = capfd.readouterr().err
    assert said.startswith("ERROR - net.pth: it can be read only by running code that it names (")
    assert "mkdir" in said and "--keep" in said
    assert not trap.exists()
    assert entries(tmp_path) == ["model"]
    assert convert(model, tmp_path / "out", "--keep", "net.*") == 0  # which starts no process
    assert not trap.exists() and (tmp_path / "out" / "net.pth").exists()


def test_an_archive_becomes_a_stored_one_with_all_else_in_it(model: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, model / "net.pth")
    (model / "data").mkdir()
    (model / "data" / ".hidden").write_text("x")
    (model / "run.sh").write_text("true")
    (model / "run.sh").chmod(0o755)
    packed = tmp_path / "m.mar"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in below(model):
            archive.write(model / name, name)
    assert convert(packed, tmp_path / "new.mar") == 0
    with zipfile.ZipFile(tmp_path / "new.mar") as archive:
        infos = {info.filename: info for info in archive.infolist()}
        assert archive.testzip() is None
    assert sorted(infos) == [
        "MAR-INF/MANIFEST.json",
        "data/.hidden",
        "net.safetensors",
        "own.py",
        "run.sh",
    ]
    assert {info.compress_type for info in infos.values()} == {zipfile.ZIP_STORED}
    assert infos["run.sh"].external_attr >> 16 & 0o777 == 0o755
    assert entries(tmp_path) == ["m.mar", "model", "new.mar"]


def test_files_that_are_no_weights_are_kept(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(1)}, model / "net.pth")
    torch.save({"step": 3, "moments": [torch.ones(1)]}, model / "state.pt")
    torch.save({"any": Trap(tmp_path / "trap")}, model / "training_args.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and in use
        torch.jit.script(torch.nn.ReLU()).save(str(model / "script.pt"))
    (model / "vocabulary.bin").write_bytes(b"\x80\x02 something else")
    assert convert(model, tmp_path / "out") == 0
    said = capfd.readouterr().err
    for name, why in {
        "state.pt": "kept, it holds something else than tensors by name",
        "training_args.bin": "kept",
        "script.pt": "kept, it is a TorchScript program",
        "vocabulary.bin": "kept, torch.save has not written it",
    }.items():
        assert f"{name}: {why}" in said
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_a_checkpoint_gives_its_state_dict_and_says_what_is_left_out(tmp_path: Path) -> None:
    said, found = one({"state_dict": {"w": torch.ones(1)}, "epoch": 3}, tmp_path)
    assert found.keys() == {"w"}
    assert said == "only its state_dict is converted, without epoch"


def test_shards_and_their_index_get_the_names_that_transformers_looks_for(
    model: Path, tmp_path: Path
) -> None:
    shards = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    for name, shard in zip("ab", shards, strict=True):
        torch.save({name: torch.ones(1)}, model / shard)
    index = {"metadata": {"total_size": 8}, "weight_map": dict(zip("ab", shards, strict=True))}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    torch.save({"w": torch.ones(1)}, model / "net.pth")
    assert convert(model, tmp_path / "out") == 0
    followed = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert followed["metadata"] == index["metadata"]
    for name, file in followed["weight_map"].items():
        assert load_file(tmp_path / "out" / file).keys() == {name}
    assert not list((tmp_path / "out").glob("*.bin*"))


def test_safetensors_that_are_there_are_not_replaced(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / "pytorch_model.bin").write_bytes(b"weights")
    (model / "model.safetensors").write_text("theirs")
    assert convert(model, tmp_path / "out") == 0
    assert (tmp_path / "out" / "model.safetensors").read_text() == "theirs"
    assert "pytorch_model.bin: kept, model.safetensors is there already" in capfd.readouterr().err


def test_two_files_of_one_new_name_are_refused(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("net.pt", "net.pth"):
        (model / name).write_bytes(b"")
    assert convert(model, tmp_path / "out") == 1
    assert "net.pt and net.pth would both become net.safetensors" in capfd.readouterr().err


def test_code_that_names_a_converted_file_is_named(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(1)}, model / "net.pth")
    (model / "own.py").write_text(HANDLER + "PATH = 'net.pth'\n")
    (model / "other.py").write_text("PATH = 'subnet.pth'\n")
    assert convert(model, tmp_path / "out") == 0
    said = capfd.readouterr().err
    assert "WARNING: own.py names net.pth, which is net.safetensors now" in said
    assert "other.py" not in said


def test_what_is_there_is_replaced_only_when_asked(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("")
    assert convert(model, out) == 1
    assert below(out) == ["mine"]
    assert convert(model, out, "--force") == 0
    assert "mine" not in below(out)
    assert entries(tmp_path) == ["model", "out"]


@pytest.mark.parametrize("out", ["out.tar.gz", "model/inner", "nowhere/out.mar"])
def test_a_place_that_cannot_be_is_wrong_usage(out: str, model: Path, tmp_path: Path) -> None:
    assert convert(model, tmp_path / out) == 2
    assert convert(tmp_path / "none", tmp_path / "fine.mar") == 2


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "net.pth"
    torch.save({"w": torch.ones(100_000)}, source, _use_new_zipfile_serialization=False)
    with source.open("r+b") as file:
        file.truncate(200_000)
    with pytest.raises(convert_weights.Refused, match="it is damaged"):
        convert_weights.convert(str(source), str(tmp_path / "out"))
    assert entries(tmp_path) == ["net.pth"]


def test_the_command_itself_imports_no_torch(model: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, model / "net.pth")
    code = (
        "import sys; from mmserve.cli import main; code = main._run(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    words = ["archive", "convert", str(model), str(tmp_path / "out.mar")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out.mar'}\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pytorch_model.bin", "model.safetensors"),
        ("a/pytorch_model.bin", "a/model.safetensors"),
        ("pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors"),
        ("pytorch_model_old.bin", "pytorch_model_old.safetensors"),
        ("net.v2.pth", "net.v2.safetensors"),
    ],
)
def test_new_names(old: str, new: str) -> None:
    assert new_name(old) == new
