"""`mmserve archive resnet`: weights in, an archive out that serves without code."""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mmserve.cli import archive_resnet, archiver
from mmserve.cli import main as cli

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

pytestmark = pytest.mark.torch

NAMES = ["ant", "bee", "cat"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a trainer leaves them: half of what is needed, wrapped, with an optimizer beside."""
    torch.manual_seed(1)
    network = torchvision.models.resnet18(num_classes=3)
    state = {f"module.{key}": value for key, value in network.state_dict().items()}
    path = tmp_path_factory.mktemp("trained") / "best.pth"
    torch.save({"state_dict": state, "epoch": 4, "optimizer": {"lr": 0.1}}, path)
    (path.parent / "labels.txt").write_text("\n".join(NAMES) + "\n")
    return path


def run(folder: Path, *words: Any) -> tuple[int, list[Path]]:
    written: list[Path] = []
    arguments = [*map(str, words), "--export-path", str(folder)]
    return archive_resnet.main(arguments, on_written=written.append), written


def test_an_archive_serves_without_code(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = weights.with_name("labels.txt")
    assert run(tmp_path, weights, "--labels", labels) == (0, [tmp_path / "best.mar"])
    assert "resnet18, 3 labels, images of 224 × 224" in capsys.readouterr().err
    served = tmp_path / "served"
    with zipfile.ZipFile(tmp_path / "best.mar") as archive:
        archive.extractall(served)
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
    assert manifest["model"] == {"modelName": "best", "handler": "mmserve_handlers.resnet:handle"}
    files = sorted(path.name for path in served.iterdir() if path.is_file())
    assert files == ["labels.txt", "model.json", "model.pt"]
    assert json.loads((served / "model.json").read_text()) == {"architecture": "resnet18"}
    state = torch.load(served / "model.pt", weights_only=True, mmap=True)
    assert state["layer1.0.conv1.weight"].is_contiguous(memory_format=torch.channels_last)
    trained = torch.load(weights, weights_only=True)["state_dict"]
    assert all(torch.equal(state[key.removeprefix("module.")], trained[key]) for key in trained)


def test_how_images_were_prepared_is_kept(weights: Path, tmp_path: Path) -> None:
    words = ["--size", 16, "--std", 0.25, "--full-scale", 16, "--name", "digits"]
    words += ["--mean", 0.5]
    form = ["--archive-format", "no-archive"]
    assert run(tmp_path, weights, *words, *form, "--top-k", 1)[0] == 0
    assert json.loads((tmp_path / "digits" / "model.json").read_text()) == {
        "architecture": "resnet18", "size": 16, "mean": [0.5], "std": [0.25], "full_scale": 16.0,
        "top_k": 1,
    }  # fmt: skip


def test_a_directory_of_transformers_is_taken(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    config = transformers.ResNetConfig(**sizes, layer_type="basic", num_labels=3)
    source = tmp_path / "tiny"
    transformers.ResNetForImageClassification(config).save_pretrained(source)
    code, written = run(tmp_path, source)
    assert (code, written) == (0, [tmp_path / "tiny.mar"])
    with zipfile.ZipFile(written[0]) as archive:
        assert {"config.json", "model.safetensors"} <= set(archive.namelist())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--arch", "resnet50"], "says resnet50, and the weights are those of a resnet18"),
        (["--labels", "two.txt"], "there are 2 labels, and the network has 3 outputs"),
        (["--labels", "nowhere.txt"], "nowhere.txt: No such file"),
        (["--name", "a b"], "'a b' cannot be a model's name"),
    ],
)
def test_what_does_not_fit_makes_no_archive(
    weights: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: Sequence[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.txt").write_text("a\nb\n")
    assert run(tmp_path, weights, *words) == (1, [])
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["two.txt"]


def test_broken_weights_make_no_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "x.pt"
    broken.write_bytes(b"PK\x03\x04")
    assert run(tmp_path, broken) == (1, [])
    assert "model.pt is damaged or cut short" in capsys.readouterr().err


def test_it_is_a_word_of_the_archive_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mmserve", "archive", "resnet", str(tmp_path / "none.pt")])
    assert cli.main() == 1
    assert "none.pt does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [("none.pt", "does not exist"), ("x.onnx", "is none of .pt"), ("folder", "without config")],
)
def test_what_are_no_weights_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    (tmp_path / "x.onnx").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    assert run(tmp_path, tmp_path / name)[0] == 1
    assert text in capsys.readouterr().err


def test_without_torch_the_architecture_must_be_said(tmp_path: Path) -> None:
    """A fresh interpreter of which nothing but the server's own directory is on the path."""
    import subprocess

    (tmp_path / "x.pt").write_bytes(b"weights")
    root = Path(archiver.__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from mmserve.cli import archive_resnet;"
        "sys.exit(archive_resnet.main(sys.argv[1:]))"
    )

    def without_torch(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", "-c", code, "x.pt", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    refused = without_torch()
    assert refused.returncode == 1
    assert "torch is not installed" in refused.stderr and "--arch resnet50" in refused.stderr
    made = without_torch("--arch", "resnet50")
    assert made.returncode == 0 and "nothing was checked" in made.stderr
    with zipfile.ZipFile(tmp_path / "x.mar") as archive:
        assert json.loads(archive.read("model.json")) == {"architecture": "resnet50"}
        assert archive.read("model.pt") == b"weights"
