from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import ConfigurationError, Unauthorized
from mmserve.frontend.guard import (
    TokenFile,
    bearer_token,
    is_allowed_origin,
    is_bound_to_loopback,
    is_loopback,
    is_same_origin,
    split_port,
)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"],
)
def test_this_machine_has_several_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0.0.0.0",
        "10.0.0.1",
        "evil.example",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.1",
        "::",
        "::2",
        "::ffff:10.0.0.1",
        "a\0b",
    ],
)
def test_other_hosts_are_not_this_machine(host: str) -> None:
    assert not is_loopback(host)


@given(st.text())
def test_any_host_is_this_machine_or_not(host: str) -> None:
    assert is_loopback(split_port(host)[0]) in (True, False)


@pytest.mark.parametrize(
    ("address", "is_bound"),
    [
        ("http://127.0.0.1:8081", True),
        ("HTTPS://localhost", True),
        ("http://[::1]:8081", True),
        ("http://0.0.0.0:8081", False),
        ("http://[::]:8081", False),
        ("http://somewhere:8081", False),
        ("unix:/run/m.sock", False),
    ],
)
def test_a_listener_is_bound_to_loopback_or_wider(address: str, is_bound: bool) -> None:
    assert is_bound_to_loopback(address) is is_bound


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
