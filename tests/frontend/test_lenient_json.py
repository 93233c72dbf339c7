import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.frontend.lenient_json import MAX_DEPTH, NotJson, Value, parse

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_all_that_is_json_is_read_as_json(value: Value, ascii_only: bool, indent: int) -> None:
    assert parse(json.dumps(value, ensure_ascii=ascii_only, indent=indent)) == value


@given(st.text())
def test_any_text_is_read_or_refused_with_its_place(text: str) -> None:
    try:
        parse(text)
    except NotJson as error:
        assert re.search(r"at line \d+, column \d+$", str(error))


@given(st.dictionaries(TEXTS, TEXTS))
def test_single_quotes_do_as_well(values: dict[str, str]) -> None:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    text = "{" + ",".join(f"{quoted(key)}:{quoted(value)}" for key, value in values.items()) + "}"
    assert parse(text) == values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{url:a.mar,n:5}", {"url": "a.mar", "n": 5}),
        ("{url=echo;model_name=>t,n=0}", {"url": "echo", "model_name": "t", "n": 0}),
        (
            "{a: True, b: FALSE, c: Null, d: trues}",
            {"a": True, "b": False, "c": None, "d": "trues"},
        ),
        ("// c\n{a:1,/* x */b:2, # hash\n c:3}", {"a": 1, "b": 2, "c": 3}),
        ("\ufeff{'a': 'line\nbreak'}", {"a": "line\nbreak"}),
        ("{'a': 007, 'b': 1.50, 'c': -0, 'd': 1e2}", {"a": "007", "b": 1.5, "c": 0, "d": 100.0}),
        ("{a: 1, a: 2}", {"a": 2}),
        (r"'\u0041\ud83d\ude00\/\n'", "A😀/\n"),
        ("  [ ]  ", []),
        ("{}", {}),
    ],
)
def test_what_people_type_is_read_too(text: str, value: Value) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "line 1, column 1"),
        ("{bad", "line 1, column 5"),
        ("{a:1,}", "line 1, column 6"),
        ("{a:1} b", "line 1, column 7"),
        ("{a:1}}", "line 1, column 6"),
        ("{a:\n 'x", "line 2, column 2"),
        ("[1,,2]", "line 1, column 4"),
        ("{a:1 b:2}", "line 1, column 6"),
        ("/* never", "line 1, column 1"),
        ("http://x", "line 1, column 5"),
        (r"'\x41'", "line 1, column 2"),
        (r"'\u00g0'", "line 1, column 2"),
        (r"'\ud800'", "line 1, column 2"),
        (r"'\udc00\ud800'", "line 1, column 2"),
        ("9" * 401, "line 1, column 1"),
        ("{" * 100, "line 1, column 2"),
    ],
)
def test_what_is_refused_is_shown(text: str, where: str) -> None:
    with pytest.raises(NotJson, match=f"at {where}$"):
        parse(text)


def test_depth_has_a_limit_and_no_traceback() -> None:
    assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(NotJson, match="deeper"):
        parse("[" * 100_000)
