from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest, DownloadFailed, ServeError, SourceNotFound
from mmserve.models.limits import Rules
from mmserve.models.source import (
    is_allowed,
    is_within,
    local_path,
    parse_remote,
    scheme_of,
    shown,
    without_credentials,
)


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("http://h/m.mar", "http"),
        ("HTTPS://h/m.mar", "https"),
        ("s3://b/k", None),
        ("file:///etc/passwd", None),
        ("http:/h", None),
        ("/abs", None),
        ("m.mar", None),
    ],
)
def test_only_allowed_schemes_are_schemes(url: str, scheme: str | None) -> None:
    assert scheme_of(url, Rules()) == scheme


@pytest.mark.parametrize(
    ("url", "store", "kind", "text"),
    [
        ("", "/s", BadRequest, "Parameter url is required."),
        ("  ", "/s", BadRequest, "Parameter url is required."),
        ("a..b", None, SourceNotFound, "Relative path is not allowed in url: a..b"),
        ("../m", "/s", SourceNotFound, "Relative path is not allowed in url: ../m"),
        ("m.mar", None, SourceNotFound, "Model store has not been configured."),
        (".", "/s", SourceNotFound, "Model not found in model store: ."),
        ("/", "/s", SourceNotFound, "Model not found in model store: /"),
        ("a\0b", "/s", SourceNotFound, "Model not found in model store: a\0b"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    url: str, store: str | None, kind: type[ServeError], text: str
) -> None:
    with pytest.raises(kind) as caught:
        local_path(url, store)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("url", "store", "path"),
    [
        ("m.mar", "/s", "/s/m.mar"),
        ("/m.mar", "/s/", "/s/m.mar"),
        ("sub/m", "/s", "/s/sub/m"),
        ("/opt/ml/models/aa/model", "/", "/opt/ml/models/aa/model"),
        ("s3://b/k", "/s", "/s/s3:/b/k"),
    ],
)
def test_everything_else_lies_below_the_store(url: str, store: str, path: str) -> None:
    assert local_path(url, store) == Path(path)


@given(st.text(max_size=40))
def test_no_text_leaves_the_store(url: str) -> None:
    try:
        path = local_path(url, "/store")
    except ServeError:
        return
    assert str(path).startswith("/store/")
    assert ".." not in path.parts


@pytest.mark.parametrize(
    "url",
    [
        "http://h:99999/m.mar",
        "http://h:-1/",
        "http://h:x/",
        "http://[::1/",
        "http://[zz]/",
        "http://a b/",
        "http://h/\r\nX: y",
        "http://h\n/",
        "http://" + "a" * 70 + ".example/",
        "http://exa\u2100mple/",
    ],
)
def test_a_malformed_url_is_not_found(url: str) -> None:
    with pytest.raises(SourceNotFound, match="Invalid model url: "):
        parse_remote(url)


@pytest.mark.parametrize("url", ["http://", "http:///m.mar", "http://:80/", "https://h:0/m.mar"])
def test_a_url_that_leads_to_no_server_cannot_be_downloaded(url: str) -> None:
    with pytest.raises(DownloadFailed, match="Failed to download model from: http"):
        parse_remote(url)


def test_a_url_is_cut_and_quoted() -> None:
    remote = parse_remote("HTTP://us%40er:p%3Aw@[::1]:8000/a dir/caf\u00e9.mar?x=1&y=\u00e9#top")
    assert (remote.scheme, remote.host, remote.port) == ("http", "::1", 8000)
    assert remote.target == "/a%20dir/caf%C3%A9.mar?x=1&y=%C3%A9"
    assert remote.login == ("us@er", "p:w")
    assert parse_remote("https://b\u00fccher.example").host == "xn--bcher-kva.example"
    assert parse_remote("https://h").target == "/"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://u:p@h/m.mar", "http://h/m.mar"),
        ("http://u:p@ss@h/m", "http://h/m"),
        ("http://h/p@th", "http://h/p@th"),
        ("http://h?x=a@b", "http://h?x=a@b"),
        ("m.mar", "m.mar"),
        ("http://h/m?X-Amz-Signature=abc&v=1", "http://h/m?X-Amz-Signature=***&v=1"),
        ("http://h/m?a=1&token=abc#f", "http://h/m?a=1&token=***#f"),
    ],
)
def test_credentials_are_not_shown(url: str, text: str) -> None:
    assert shown(url) == text


@given(st.text(alphabet="ab:/@?#\\[]", max_size=25))
def test_without_credentials_no_at_sign_stands_before_the_host(tail: str) -> None:
    url = without_credentials("http://" + tail)
    try:
        remote = parse_remote(url)
    except (SourceNotFound, DownloadFailed):
        return
    assert remote.login is None


def test_urls_must_match_from_end_to_end() -> None:
    rules = Rules(urls=r"https://models\.example/.*")
    assert is_allowed("https://models.example/m.mar", rules)
    assert is_allowed("https://u:p@models.example/m.mar", rules)
    assert not is_allowed("https://models.example.evil/m.mar", rules)
    assert not is_allowed("https://evil/https://models.example/m.mar", rules)
    assert not is_allowed("https://models.example/@evil/../m".replace("/@", "@"), rules)


def test_a_link_that_leads_out_is_not_within(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "m.mar").write_text("x")
    (store / "in.mar").write_text("x")
    for name, target in (("good", "in.mar"), ("bad", "../m.mar"), ("loop", "loop")):
        (store / name).symlink_to(target)
    assert is_within(store / "good", store.resolve())
    assert not is_within(store / "bad", store.resolve())
    assert not is_within(store / "loop", store.resolve())
