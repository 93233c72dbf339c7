"""Where listeners bind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.config.addresses import Address, is_loopback, parse
from mmserve.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:8080", Address("http", "127.0.0.1", 8080)),
        ("HTTPS://Example.org:8443", Address("https", "Example.org", 8443)),
        ("http://localhost:0", Address("http", "localhost", 0)),
        ("http://0.0.0.0:65535", Address("http", "0.0.0.0", 65535)),
        ("http://127.0.0.1:42523", Address("http", "127.0.0.1", 42523)),
        ("http://[::1]:8080", Address("http", "::1", 8080)),
        ("http://[fe80::1%eth0]:80", Address("http", "fe80::1%eth0", 80)),
        ("unix:/run/m.sock", Address("unix", path="/run/m.sock")),
        ("unix:///run/m m.sock", Address("unix", path="/run/m m.sock")),
    ],
)
def test_the_forms_of_an_address(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("key", "text", "port"),
    [
        ("inference_address", "http://h", 80),
        ("inference_address", "https://h", 443),
        ("management_address", "http://h", 8081),
        ("management_address", "https://[::]", 8444),
    ],
)
def test_a_missing_port_depends_on_the_key_and_the_scheme(key, text, port):
    assert parse(text, key).port == port


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:8080",
        "ftp://127.0.0.1:8080",
        "http://",
        "http://:8080",
        "http://127.0.0.1:8080/",
        "http://127.0.0.1:8080/path",
        "http://127.0.0.1:80x",
        "http://127.0.0.1:",
        "http://127.0.0.1:-1",
        "http://127.0.0.1:65536",
        "http://127.0.0.1:" + "9" * 5000,
        "http://user@127.0.0.1:80",
        "http://::1:8080",
        "http://[::1",
        "http://[localhost]:80",
        "http://[::1%]:80",
        "http://a b:80",
        "unix:relative",
        "unix:",
        "unix:/a\0b",
        "unix:/" + "d" * 120,
    ],
)
def test_what_is_no_address_is_refused_with_key_value_and_what_is_allowed(text):
    with pytest.raises(ConfigurationError) as refused:
        parse(text, "management_address")
    assert f"management_address={text} is not an address; " in str(refused.value)


@given(st.text())
def test_any_text_is_an_address_or_refused(text):
    try:
        address = parse(text)
    except ConfigurationError:
        return
    assert parse(address.url) == address


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("http://127.0.0.1:1", True),
        ("http://127.9.9.9:1", True),
        ("http://LOCALHOST:1", True),
        ("http://[::1]:1", True),
        ("unix:/s", True),
        ("http://0.0.0.0:1", False),
        ("http://[::]:1", False),
        ("http://127.example.org:1", False),
        ("http://10.0.0.1:1", False),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(text, is_loopback):
    assert parse(text).is_loopback == is_loopback


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("http://127.0.0.1:80", "http://127.0.0.1:80", True),
        ("http://127.0.0.1:80", "https://127.0.0.1:80", True),
        ("http://127.0.0.1:80", "http://127.0.0.1:81", False),
        ("http://127.0.0.1:80", "http://localhost:80", False),
        ("http://127.0.0.1:0", "http://127.0.0.1:0", False),
        ("unix:/a", "unix:/a", True),
        ("unix:/a", "unix:/b", False),
        ("unix:/a", "http://a:80", False),
    ],
)
def test_equal_host_and_port_make_one_listener(one, other, is_same):
    assert parse(one).same_listener(parse(other)) == is_same
    assert parse(other).same_listener(parse(one)) == is_same


def test_tls_follows_the_scheme():
    assert parse("https://h:1").is_tls
    assert not parse("http://h:1").is_tls
    assert not parse("unix:/s").is_tls
    assert parse("unix:/s").is_unix


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST.", "a.localhost", "127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"],
)
def test_this_machine_has_several_names(host):
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
def test_other_hosts_are_not_this_machine(host):
    assert not is_loopback(host)


@given(st.text())
def test_any_host_is_this_machine_or_not(host):
    assert is_loopback(host) in (True, False)
