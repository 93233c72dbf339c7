from hypothesis import given
from hypothesis import strategies as st

from mmserve.logs.escape import escaped, indented


@given(st.text())
def test_an_escaped_text_is_one_line(text: str) -> None:
    assert len(escaped(text).splitlines()) <= 1


@given(st.text())
def test_no_line_of_an_indented_text_but_the_first_begins_at_the_margin(text: str) -> None:
    _, *others = indented(text).splitlines()[:1] + indented(text).splitlines()[1:] or [""]
    assert all(line.startswith("\t") for line in others)


def test_plain_text_stays_as_it_is() -> None:
    assert escaped("predictions/a b?c=ü 你好 👩‍🚀\t") == "predictions/a b?c=ü 你好 👩‍🚀\t"


def test_what_moves_a_cursor_is_shown() -> None:
    assert escaped("\x1b[2J\a\r\nx\x9b\u2028") == "\\x1b[2J\\x07\\r\\nx\\x9b\\u2028"
