"""Results as bytes: quiet."""

from __future__ import annotations

import json
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.runtime.failures import BadReply
from mmserve.runtime.results import UNSUPPORTED, body_of, json_of

keys = st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none())
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec=None))
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.tuples(inner, inner),
    ),
    max_leaves=20,
)


@given(values)
def test_json_is_byte_for_byte_that_of_the_standard_library(value: Any) -> None:
    assert json_of(value) == json.dumps(value, indent=2).encode()


class Colour(IntEnum):
    RED = 1


class Text(str):
    def encode(self, *_: object) -> bytes:
        raise AssertionError("not ours to call")


def test_subclasses_are_what_they_derive_from() -> None:
    assert body_of(OrderedDict(a=Colour.RED)) == (b'{\n  "a": 1\n}', True)
    assert body_of(Text("é")) == ("é".encode(), False)
    assert body_of(type("Mine", (bytes,), {})(b"x")) == (b"x", False)


class Hostile:
    def __iter__(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(
    "value", [Hostile(), {1, 2}, [b"a"], {(1, 2): 3}, memoryview(b"x"), 1j, "\ud800", [object()]]
)
def test_what_has_no_form_is_refused(value: object) -> None:
    with pytest.raises(BadReply, match=UNSUPPORTED):
        body_of(value)


def test_a_nest_too_deep_for_json_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(BadReply):
        body_of(value)


@pytest.mark.parametrize("value", [b"raw", bytearray(b"raw")])
def test_bytes_are_not_copied(value: object) -> None:
    assert body_of(value)[0] is value
