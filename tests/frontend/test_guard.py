from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import ConfigurationError, Unauthorized
from mmserve.frontend.guard import (
    TokenFile,
    bearer_token,
    is_allowed_origin,
    is_same_origin,
    named_host,
    split_authority,
)


@pytest.mark.parametrize(
    ("authority", "parts"),
    [
        ("LocalHost", ("localhost", "")),
        ("localhost:8081", ("localhost", "8081")),
        ("[::1]:8081", ("::1", "8081")),
        ("[::1]", ("::1", "")),
        ("localhost:", ("localhost", "")),
    ],
)
def test_an_authority_is_taken_apart(authority: str, parts: tuple[str, str]) -> None:
    assert split_authority(authority) == parts


@pytest.mark.parametrize(
    "authority",
    [
        "",
        ":80",
        "localhost:80@evil.example",
        "localhost@evil.example",
        "[::1]evil.example",
        "[::1].evil.example:80",
        "[localhost]",
        "::1",
        "localhost evil.example",
        "localhost:80:80",
        "localhost/evil.example",
        "localhost:8x",
    ],
)
def test_what_is_no_authority_is_not_taken_for_its_beginning(authority: str) -> None:
    assert split_authority(authority) is None


@given(st.text())
def test_any_text_is_an_authority_or_not(text: str) -> None:
    parts = split_authority(text)
    assert parts is None or parts[0]


@pytest.mark.parametrize(
    ("target", "header", "host"),
    [
        ("/models", "localhost:8081", "localhost:8081"),
        ("/models?url=http://a.example", "localhost", "localhost"),
        ("/models", None, ""),
        ("*", "localhost", "localhost"),
        ("http://evil.example/models", "localhost", "evil.example"),
        ("http://localhost:8081?limit=1", "evil.example", "localhost:8081"),
        ("http://localhost", None, "localhost"),
    ],
)
def test_an_absolute_target_names_the_host(target: str, header: str | None, host: str) -> None:
    assert named_host(target, header) == host


@pytest.mark.parametrize(
    ("origin", "host", "is_same"),
    [
        ("http://localhost:8081", "localhost:8081", True),
        ("http://LocalHost:8081", "localhost:8081", True),
        ("https://a.example", "a.example", True),
        ("https://a.example", "a.example:443", True),
        ("http://[::1]:8081", "[::1]:8081", True),
        ("http://localhost:3000", "localhost:8081", False),
        ("http://evil.example", "localhost:8081", False),
        ("null", "localhost:8081", False),
        ("file://localhost", "localhost", False),
        ("http://localhost:80@evil.example", "localhost:80@evil.example", False),
        ("", "localhost", False),
        ("http://", "", False),
    ],
)
def test_an_origin_is_the_server_itself_or_not(origin: str, host: str, is_same: bool) -> None:
    assert is_same_origin(origin, host) is is_same


@pytest.mark.parametrize(
    ("allowed", "is_allowed"),
    [(None, False), ("", False), ("*", True), ("http://A.example/", True), ("http://b", False)],
)
def test_cors_decides_about_foreign_origins(allowed: str | None, is_allowed: bool) -> None:
    assert is_allowed_origin("http://a.example", allowed) is is_allowed


@pytest.mark.parametrize(
    ("header", "token"),
    [("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", None), (None, None)],
)
def test_a_token_is_taken_out_of_its_header(header: str | None, token: str | None) -> None:
    assert bearer_token(header) == token


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    tokens = TokenFile(str(path))
    tokens.check("Bearer first")

    # Replaced as secret stores do it: a new file, renamed over the old one.
    fresh = tmp_path / "fresh"
    fresh.write_text("other")
    fresh.replace(path)
    tokens.check("Bearer other")
    with pytest.raises(Unauthorized):
        tokens.check("Bearer first")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic right", "right"])
def test_without_the_token_nobody_enters(tmp_path: Path, header: str | None) -> None:
    path = tmp_path / "token"
    path.write_text("right")
    with pytest.raises(Unauthorized):
        TokenFile(str(path)).check(header)


def test_a_token_may_have_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("pâté", "utf-8")
    on_the_wire = "pâté".encode().decode("latin-1")
    TokenFile(str(path)).check(f"Bearer {on_the_wire}")


@pytest.mark.parametrize("change", ["gone", "empty"])
def test_a_token_file_that_breaks_lets_nobody_in(tmp_path: Path, change: str) -> None:
    path = tmp_path / "token"
    path.write_text("right")
    tokens = TokenFile(str(path))
    path.unlink()
    if change == "empty":
        path.write_text("")
    for header in ("Bearer right", "Bearer ", "Bearer"):
        with pytest.raises(Unauthorized):
            tokens.check(header)


def test_a_token_file_must_be_readable_and_full_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"management_token_file=.*absent cannot be read"):
        TokenFile(str(tmp_path / "absent"))
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ConfigurationError, match="is empty"):
        TokenFile(str(tmp_path / "empty"))
