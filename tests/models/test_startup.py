from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.models.startup import in_list, in_store, is_all


def test_a_list_is_cut_at_commas_and_the_first_equals_sign() -> None:
    listed = in_list("a.mar,, n=b.mar , http://h/m.mar?x=1,q=http://h/m.mar?x=1&y=2")
    assert listed.models == [
        (None, "a.mar"),
        ("n", "b.mar"),
        (None, "http://h/m.mar?x=1"),
        ("q", "http://h/m.mar?x=1&y=2"),
    ]
    assert listed.warnings == []


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a.mar,a.mar", [(None, "a.mar")]),
        ("n=a.mar,n=b.mar", [("n", "a.mar")]),
        ("n=", []),
    ],
)
def test_an_entry_that_cannot_work_is_left_out_with_a_warning(
    text: str, kept: list[tuple[str | None, str]]
) -> None:
    listed = in_list(text)
    assert listed.models == kept
    assert len(listed.warnings) == 1


def test_a_store_gives_directories_and_archives_in_order() -> None:
    entries = [
        ("zh.mar", False),
        ("b.model", False),
        ("notes.txt", False),
        ("m.tar.gz", False),
        (".hidden", True),
        (".h.mar", False),
        ("lost+found", True),
        ("a", True),
    ]
    assert in_store(entries).models == [(None, "a"), (None, "b.model"), (None, "zh.mar")]


@pytest.mark.parametrize("text", ["ALL", "all", " All "])
def test_all_may_be_written_in_any_case(text: str) -> None:
    assert is_all(text)


@given(st.text(alphabet="ab=, :/.", max_size=30))
def test_every_entry_is_a_model_or_a_warning(text: str) -> None:
    listed = in_list(text)
    entries = [entry for entry in text.split(",") if entry.strip()]
    assert len(listed.models) + len(listed.warnings) == len(entries)
    assert len(set(listed.models)) == len(listed.models)
    names = [name for name, _ in listed.models if name is not None]
    assert len(set(names)) == len(names)


def test_an_entry_whose_name_cannot_be_told_costs_no_other() -> None:
    found = in_store([("b.mar", False), (os.fsdecode(b"caf\xe9"), True), ("a", True)])
    assert found.models == [(None, "a"), (None, "b.mar")]
    (warning,) = found.warnings
    assert "caf\\udce9" in warning
    warning.encode()
