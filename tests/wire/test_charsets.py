"""The character sets that clients may name."""

import encodings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.wire.charsets import codec_of


@pytest.mark.parametrize(
    ("charset", "codec"),
    [
        ("utf-8", "utf-8"),
        ("UTF8", "utf-8"),
        ("utf-8-sig", "utf-8-sig"),
        ("ISO-8859-1", "iso8859-1"),
        ("latin-1", "iso8859-1"),
        ("us-ascii", "ascii"),
        ("ANSI_X3.4-1968", "ascii"),
        ("windows-1252", "cp1252"),
        ("Shift_JIS", "shift_jis"),
        ("KOI8-U", "koi8-u"),
        ("utf-16", "utf-16"),
    ],
)
def test_the_names_that_clients_use_are_known(charset, codec):
    assert codec_of(charset) == codec


@pytest.mark.parametrize(
    "charset",
    [
        *("", "nope", "utf-99", "\0", "é", "a" * 10_000, "aliases", "encodings.utf_8"),
        *("base64", "hex", "rot13", "uu", "zip", "bz2", "quopri", "mbcs", "oem", "undefined"),
        *("idna", "punycode", "raw_unicode_escape", "unicode_escape", "utf-7", "charmap"),
    ],
)
def test_what_is_no_character_set_is_not_known(charset):
    assert codec_of(charset) is None


@given(st.text() | st.sampled_from(["utf-16-le", "big5hkscs", "cp037", "hz", "johab"]))
def test_a_name_that_is_known_decodes_text(charset):
    codec = codec_of(charset)
    assert codec is None or b"".decode(codec) == ""


def test_names_that_are_made_up_are_not_kept():
    before = len(encodings._cache)
    for number in range(100):
        codec_of(f"made-up-{number}")
    assert len(encodings._cache) == before
