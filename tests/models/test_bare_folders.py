"""Folders of weights without a manifest: who serves them, and what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmserve.errors import InvalidModel
from mmserve.models.layout import read_layout
from mmserve.models.manifest import Overrides, resolve

BERT = "mmserve_handlers.bert:handle"


def save(folder: Path, kind: object = "bert", weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / weights).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    "weights", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"]
)
def test_a_folder_in_the_store_is_served_under_its_name(tmp_path: Path, weights: str) -> None:
    folder = save(tmp_path / "all-MiniLM", weights=weights)
    found = resolve(read_layout(folder, tmp_path.resolve()).manifest, Overrides())
    assert (found.name, found.handler, found.runtime) == ("all-MiniLM", BERT, "python")


def test_whatever_is_said_wins_over_the_guess(tmp_path: Path) -> None:
    manifest = read_layout(save(tmp_path / "m"), tmp_path.resolve()).manifest
    said = Overrides(default_name="n", default_handler="service")
    assert resolve(manifest, said).handler == "service"
    assert resolve(manifest, said).name == "n"
    assert resolve(manifest, Overrides(handler="mine", model_name="o")).handler == "mine"


def test_a_manifest_wins_over_the_guess(tmp_path: Path) -> None:
    folder = save(tmp_path / "m")
    (folder / "MAR-INF").mkdir()
    text = '{"model": {"modelName": "x", "handler": "h"}}'
    (folder / "MAR-INF/MANIFEST.json").write_text(text)
    assert read_layout(folder, tmp_path.resolve()).manifest.guessed_handler is None


def test_an_unpacked_archive_has_no_name_of_its_own(tmp_path: Path) -> None:
    tree = save(tmp_path / "tree")
    manifest = read_layout(tree, tree.resolve()).manifest
    assert (manifest.guessed_name, manifest.guessed_handler) == (None, BERT)


def test_a_folder_that_an_archive_wraps_has_one(tmp_path: Path) -> None:
    inner = save(tmp_path / "tree" / "minilm")
    layout = read_layout(inner.parent, inner.parent.resolve())
    assert layout.manifest.guessed_name == "minilm" and layout.directory == str(inner)


@pytest.mark.parametrize("kind", ["gpt2", None, 3, ["bert"], {"a": 1}])
def test_other_kinds_need_a_handler(tmp_path: Path, kind: object) -> None:
    manifest = read_layout(save(tmp_path / "m", kind), tmp_path.resolve()).manifest
    with pytest.raises(InvalidModel, match="handler is not defined"):
        resolve(manifest, Overrides(model_name="m"))


def test_a_config_without_weights_is_no_model(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", weights="notes.txt")
    assert read_layout(folder, None).manifest.guessed_handler is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000])
def test_a_config_that_is_none_is_no_model(tmp_path: Path, text: str) -> None:
    folder = save(tmp_path / "m")
    (folder / "config.json").write_text(text)
    assert read_layout(folder, None).manifest.guessed_handler is None
