import pytest

from mmserve.logs.bridge import as_text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain", "plain"),
        (7, "7"),
        (1.80000001, "1.8"),
        ("", '""'),
        ("a b", '"a b"'),
        ("k=v", '"k=v"'),
        ('say "hi"', r'"say \"hi\""'),
        ("a\nb", r"a\nb"),
        ("a b\n", r'"a b\n"'),
        ("C:\\a b", r'"C:\\a b"'),
        ("\x1b[31m", r"\x1b[31m"),
    ],
)
def test_a_field_is_one_word_of_its_line(value: object, shown: str) -> None:
    assert as_text({"key": value}) == f" key={shown}"
