"""`reply.py`: heads of replies."""

import http.client
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.frontend.http import Response
from mmserve.frontend.reply import OWNED, Heads, Unsendable, standard_reason

CORS = [
    ("access-control-allow-origin", "*"),
    ("access-control-allow-methods", "GET, POST"),
    ("access-control-allow-headers", "X-A"),
]


def test_a_head_is_what_multi_model_server_writes() -> None:
    response = Response(200, b"ok", [("X-A", "b"), ("content-type", "text/plain")])
    assert Heads().write(response, "the-id", 2, True) == (
        b"HTTP/1.1 200 OK\r\n"
        b"X-A: b\r\n"
        b"content-type: text/plain\r\n"
        b"x-request-id: the-id\r\n"
        b"Pragma: no-cache\r\n"
        b"Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
        b"Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
        b"content-length: 2\r\n"
        b"connection: keep-alive\r\n"
        b"\r\n"
    )


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_the_server_owns_a_handler_cannot_set(name: str) -> None:
    plain = Heads().write(Response(200), "i", 0, False)
    for spelling in (name, name.title(), name.upper()):
        assert Heads().write(Response(200, b"", [(spelling, "evil")]), "i", 0, False) == plain


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-A", "b\r\nX-Evil: 1"),
        ("X-A", "b\n"),
        ("X-A", "b\rc"),
        ("X-A", "b\0c"),
        ("X-A", "b\x1bc"),
        ("X-A\r\nX-Evil", "1"),
        ("X A", "1"),
        ("X-A:", "1"),
        ("", "1"),
        ("X-Ä", "1"),
        ("connection\r\nX-Evil", "1"),
    ],
)
def test_a_header_that_could_end_the_head_is_unsendable(name: str, value: str) -> None:
    heads = Heads()
    for _ in range(2):  # not remembered as good
        with pytest.raises(Unsendable, match="header"):
            heads.write(Response(200, b"", [(name, value)]), "i", 0, True)


@pytest.mark.parametrize("status", [-1, 0, 42, 99, 100, 101, 199, 1000, 10_000])
def test_a_status_that_is_no_final_one_is_unsendable(status: int) -> None:
    with pytest.raises(Unsendable, match="status"):
        Heads().write(Response(status), "i", 0, True)


@pytest.mark.parametrize(
    ("status", "asked", "reason"),
    [
        (200, None, "OK"),
        (200, "", "OK"),
        (200, "Fine so far", "Fine so far"),
        (210, "Partial Success", "Partial Success"),
        (404, "gar \xe9", "gar \xe9"),
        (404, "a\r\nX-Evil: 1", "Not Found"),
        (404, "caf\u1234", "Not Found"),
        (413, None, "Request Entity Too Large"),
        (507, None, "Insufficient Storage"),
        (299, None, "Success (299)"),
        (599, None, "Server Error (599)"),
        (999, None, "Unknown Status (999)"),
    ],
)
def test_a_reason_is_the_handlers_or_the_standard_one(
    status: int, asked: str | None, reason: str
) -> None:
    head = Heads().write(Response(status, b"", (), asked), "i", 0, True)
    assert head.split(b"\r\n")[0].decode("latin-1") == f"HTTP/1.1 {status} {reason}"


def test_values_keep_their_bytes_or_become_utf_8() -> None:
    mirrored = "grüße ✓".encode().decode("latin-1")
    head = Heads().write(Response(200, b"", [("A", mirrored), ("B", "✓ é")]), "i", 0, True)
    assert b"A: " + "grüße ✓".encode() + b"\r\n" in head
    assert b"B: " + "✓ é".encode() + b"\r\n" in head


def test_cors_headers_are_added_unless_the_reply_has_its_own() -> None:
    heads = Heads(CORS)
    plain = heads.write(Response(404), "i", 0, False)
    own = heads.write(
        Response(200, b"", [("Access-Control-Allow-Origin", "https://a")]), "i", 0, True
    )
    for name, value in CORS:
        assert f"{name}: {value}\r\n".encode() in plain
    assert b"Access-Control-Allow-Origin: https://a\r\n" in own
    assert own.lower().count(b"access-control-allow-origin") == 1
    assert b"access-control-allow-methods: GET, POST\r\n" in own


@pytest.mark.parametrize("status", [204, 304])
def test_a_reply_without_a_body_names_no_length(status: int) -> None:
    assert b"content-length" not in Heads().write(Response(status, b"x"), "i", 1, True)


names = st.text(st.sampled_from("aB-9_~ :\r\nü\0"), max_size=6)
values = st.text(max_size=20)


@given(
    st.integers(0, 1200),
    st.none() | values,
    st.lists(st.tuples(names, values), max_size=4),
    st.integers(0, 10**12),
)
def test_any_head_that_is_written_reads_back_as_itself(
    status: int, reason: str | None, headers: list[tuple[str, str]], length: int
) -> None:
    try:
        head = Heads(CORS).write(Response(status, b"", headers, reason), "id", length, True)
    except Unsendable:
        return
    assert head.count(b"\r\n\r\n") == 1
    assert head.endswith(b"\r\n\r\n")
    first, _, fields = head.partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status)
    read = http.client.parse_headers(io.BytesIO(fields))
    assert len(read.items()) == fields.count(b"\r\n") - 1
    kept = [name for name, _ in headers if name.lower() not in OWNED]
    assert [name for name, _ in read.items()][: len(kept)] == kept


def test_every_status_has_words() -> None:
    for status in range(200, 1000):
        assert standard_reason(status)
