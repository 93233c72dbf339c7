"""What `model.json` may say, and how it is told what it may not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve_handlers import options
from mmserve_handlers.options import BadOption, Options, parse, read


def test_nothing_said_is_the_default() -> None:
    assert parse({}) == Options()
    assert parse({"task": None, "labels": None, "max_length": None}) == Options()


def test_all_that_can_be_said_is_taken() -> None:
    said = {
        "task": "ner",
        "labels": ["O", "B-LOC"],
        "precision": "amp",
        "device": "cuda:1",
        "max_length": 128,
        "top_k": 3,
        "warmup": 0,
        "normalize": False,
        "aggregation_strategy": "simple",
        "stride": 16,
    }
    found = parse(said)
    assert found.task == "token-classification" and found.labels == ("O", "B-LOC")
    assert (found.device, found.stride, found.normalize) == ("cuda:1", 16, False)


def test_labels_may_be_written_as_in_config_json() -> None:
    assert parse({"labels": {"1": "yes", "0": "no"}}).labels == ("no", "yes")


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("task", "translate", "embeddings, question-answering, text-classification"),
        ("task", ["ner"], "embeddings"),
        ("precision", "int8", "auto, fp32, amp"),
        ("precision", None, "auto, fp32, amp"),
        ("device", "gpu", "auto, cpu, cuda and cuda:N"),
        ("device", 0, "auto, cpu"),
        ("max_length", 2, "whole numbers from 3"),
        ("max_length", "128", "whole numbers"),
        ("max_length", 1.5, "whole numbers"),
        ("top_k", 0, "whole numbers from 1"),
        ("top_k", True, "whole numbers from 1"),
        ("warmup", -1, "whole numbers from 0 to 1000"),
        ("warmup", 10**6, "whole numbers from 0 to 1000"),
        ("normalize", "yes", "true and false"),
        ("labels", [], "a list of texts"),
        ("labels", ["a", ""], "a list of texts"),
        ("labels", ["a", "a"], "'a' is there more often"),
        ("labels", {"1": "a"}, "by its place"),
        ("labels", {"x": "a"}, "by its place"),
        ("aggregation_strategy", "most", "none, simple, first, average, max"),
        ("stride", -1, "whole numbers from 0"),
    ],
)
def test_a_value_that_will_not_do_is_told_with_key_and_what_would(
    key: str, value: Any, allowed: str
) -> None:
    with pytest.raises(BadOption) as caught:
        parse({key: value})
    message = str(caught.value)
    assert message.startswith(f"model.json: {key} is {json.dumps(value)}; allowed")
    assert allowed in message


@pytest.mark.parametrize(
    ("key", "near"),
    [("topk", "top_k"), ("Precision", "precision"), ("label", "labels"), ("max_len", "max_length")],
)
def test_an_unknown_key_gets_the_nearest_name(key: str, near: str) -> None:
    with pytest.raises(BadOption, match=f"did you mean '{near}'"):
        parse({key: 1})


def test_a_key_like_no_other_gets_all_names() -> None:
    with pytest.raises(BadOption, match="known are task, labels"):
        parse({"qqq": 1})


@pytest.mark.parametrize("text", ["[]", "3", "null", "{", "", "[" * 100_000])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    if text == "null":
        assert read(tmp_path) == Options()
        return
    with pytest.raises(BadOption, match=r"model\.json"):
        read(tmp_path)


def test_the_file_wins_over_the_manifest(tmp_path: Path) -> None:
    manifest = {"model": {"modelName": "m", "options": {"top_k": 2, "precision": "fp32"}}}
    assert read(tmp_path, manifest).top_k == 2
    (tmp_path / "model.json").write_text('{"top_k": 5}')
    found = read(tmp_path, manifest)
    assert (found.top_k, found.precision) == (5, "fp32")
    with pytest.raises(BadOption, match=r"the manifest's model\.options: top_k is 0"):
        read(tmp_path, {"model": {"options": {"top_k": 0}}})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(list(options._READERS)), _JSON, max_size=3) | _JSON)
def test_whatever_is_said_is_taken_or_refused_in_words(said: Any) -> None:
    try:
        assert isinstance(parse(said), Options)
    except BadOption as refused:
        assert "model.json" in str(refused)


def test_options_are_checked_from_the_command_line_without_torch() -> None:
    def check(text: str) -> tuple[int, str]:
        command = [sys.executable, "-X", "importtime", "-m", "mmserve_handlers.options"]
        ran = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert " torch" not in ran.stderr
        return ran.returncode, ran.stdout

    assert check('{"task": "fill-mask"}') == (0, "")
    code, said = check('{"task": "fill"}')
    assert code == 1 and "fill-mask" in said
