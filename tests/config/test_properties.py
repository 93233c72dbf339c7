"""The syntax of config.properties: Java's."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmserve.config.properties import parse
from mmserve.errors import ConfigurationError


def read(text: str | bytes) -> dict[str, str]:
    data = text.encode() if isinstance(text, str) else text
    return {key: entry.value for key, entry in parse(data).items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": "1"}),
        ("a:1", {"a": "1"}),
        ("a 1", {"a": "1"}),
        ("a\t=\t1", {"a": "1"}),
        ("  a  :  1", {"a": "1"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("a==1", {"a": "=1"}),
        ("a = : 1", {"a": ": 1"}),
        ("a = 1 2 3", {"a": "1 2 3"}),
        ("=1", {"": "1"}),
    ],
)
def test_the_key_ends_at_the_first_equals_colon_or_blank(text, expected):
    assert read(text) == expected


def test_trailing_blanks_of_a_value_stay():
    assert read("a=1 \t\nb = 2  ") == {"a": "1 \t", "b": "2  "}


def test_the_last_duplicate_wins():
    assert read("workers=1\nother=x\nworkers=4\n") == {"workers": "4", "other": "x"}


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_every_kind_of_line_end_ends_a_line(end):
    assert read(f"a=1{end}{end}b=2{end}") == {"a": "1", "b": "2"}


def test_comments_and_blank_lines_say_nothing():
    assert read("# a=1\n  ! b=2\n\n \t\f\nc=3 # no comment\n") == {"c": "3 # no comment"}


def test_a_comment_is_not_continued():
    assert read("# a=1 \\\nb=2") == {"b": "2"}


def test_a_backslash_at_the_end_continues_a_line_without_the_blanks_of_the_next():
    assert read("a=1,\\\n   2,\\\r\n\t3\nb=4") == {"a": "1,2,3", "b": "4"}


def test_a_continuation_is_no_comment_and_a_blank_one_ends_the_line():
    assert read("a=1\\\n#2\nb=3\\\n\nc=4") == {"a": "1#2", "b": "3", "c": "4"}


def test_two_backslashes_are_one_and_continue_nothing():
    assert read("a=C:\\\\dir\\\\\nb=2") == {"a": "C:\\dir\\", "b": "2"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("\\t\\n\\r\\f", "\t\n\r\f"),
        ("\\u0041\\u00e9\\u00E9", "Aéé"),
        ("\\ud83d\\ude00", "\U0001f600"),
        ("\\:\\=\\#\\!\\ ", ":=#! "),
        ("\\q\\b\\z", "qbz"),
    ],
)
def test_escapes(written, meant):
    assert read(f"a={written}") == {"a": meant}


def test_escaped_separators_belong_to_the_key():
    assert read("a\\ b\\:c\\=d=1") == {"a b:c=d": "1"}


@pytest.mark.parametrize("escape", ["\\u", "\\u12", "\\u12g4", "\\ud83d", "\\ude00x"])
def test_an_escape_that_is_none_is_refused_with_its_line(escape):
    with pytest.raises(ConfigurationError, match="line 3"):
        read(f"# 1\na=1\nb={escape}\n")


def test_utf_8_is_read_where_it_is_valid_and_latin_1_elsewhere():
    assert read("a=café") == {"a": "café"}
    assert read("a=café".encode("latin-1")) == {"a": "café"}
    assert read(b"\xef\xbb\xbfa=1") == {"a": "1"}


def test_an_entry_knows_the_line_on_which_it_begins():
    entries = parse(b"# first\n\na=1,\\\n2\nb=2\r\n\r\na=3")
    assert {key: entry.line for key, entry in entries.items()} == {"a": 7, "b": 5}


# A writer, to read back what it wrote

CONTROL = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\f": "\\f"}


def write(entries: dict[str, str], random: Random) -> str:
    """The entries as a file; `random` picks among spellings that mean the same."""

    def spell(text: str, special: str) -> str:
        spelled = ""
        is_first = True  # of the text or of a line: a plain blank would be lost
        for left, character in zip(range(len(text))[::-1], text, strict=True):
            if character in CONTROL:
                spelled += CONTROL[character]
            elif character in special or (is_first and character in " =:"):
                spelled += "\\" + character
            elif random.random() < 0.2:
                units = character.encode("utf-16-be").hex()
                spelled += "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
            else:
                spelled += character
            if is_first := left > 0 and random.random() < 0.1:
                spelled += "\\\n" + random.choice(["", "  ", "\t"])
        return spelled

    lines = []
    for key, value in entries.items():
        lines += random.choice([[], [""], ["# note=1"], ["  ! note \\"]])
        separator = random.choice(["=", ":", " = ", "\t:\t", "  "])
        lines.append(spell(key, special="=: #!") + separator + spell(value, special=""))
    return random.choice(["\n", "\r\n", "\r"]).join(lines)


TEXT = st.text(st.sampled_from("aZ09_.=: #!\\\t") | st.characters(exclude_categories=["Cs"]))


@given(entries=st.dictionaries(TEXT.filter(bool), TEXT), seed=st.integers())
def test_what_a_writer_wrote_is_read_back(entries, seed):
    assert read(write(entries, Random(seed))) == entries


@given(st.binary())
@example(b"\\")
@example(b"a=\\u00\xff")
def test_bytes_are_read_or_refused_in_words(data):
    try:
        entries = parse(data)
    except ConfigurationError as error:
        assert "line" in str(error)
        return
    for entry in entries.values():
        entry.value.encode()  # no half of a surrogate pair
        assert entry.line >= 1
