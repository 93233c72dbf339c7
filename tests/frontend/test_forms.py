from collections.abc import Callable
from urllib.parse import quote_from_bytes, urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest
from mmserve.frontend.forms import (
    MAX_FIELDS,
    as_parameters,
    body_parameters,
    first_values,
    options,
    query_pairs,
)

URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=B"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = TEXTS.filter(bool)


def percent_every_byte(value: bytes) -> str:
    return "".join(f"%{byte:02x}" for byte in value)


def barely_encoded(value: bytes) -> str:
    """As little as can be: line breaks and equals signs stay."""
    text = value.decode("latin-1").replace("%", "%25").replace("+", "%2B")
    return text.replace("&", "%26").replace(" ", "+")


Seen = dict[str, tuple[bytes, str | None]]


def seen(content_type: str, body: bytes) -> Seen:
    """The handler's dict: name → value and media type."""
    parameters = body_parameters(content_type, body)
    for parameter, value in parameters:
        assert parameter.size == len(value)
    return {p.name: (bytes(value), p.content_type) for p, value in parameters}


def part(
    name: str, value: bytes, filename: str | None = None, media_type: str | None = None
) -> bytes:
    lines = [f'--B\r\nContent-Disposition: form-data; name="{name}"']
    lines[0] += f"; filename={filename}" if filename is not None else ""
    lines += [f"Content-Type: {media_type}"] if media_type else []
    return "\r\n".join([*lines, "", ""]).encode() + value + b"\r\n"


END = b"--B--\r\n"


# Plain bodies


@given(st.binary(), st.sampled_from(["", "application/json", "image/jpeg", "x", "text/x; form"]))
def test_a_body_that_is_no_form_is_one_parameter_and_is_not_copied(
    body: bytes, content_type: str
) -> None:
    ((parameter, value),) = body_parameters(content_type, body)
    assert (parameter.name, parameter.size) == ("body", len(body))
    assert parameter.content_type == content_type
    assert value is body


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=B",
        "application/x-www-form-urlencodedX",
        "text/x; application/x-www-form-urlencoded",
    ],
)
def test_what_only_looks_like_a_form_is_a_body(content_type: str) -> None:
    assert seen(content_type, b"a=1") == {"body": (b"a=1", content_type)}


# Query


@given(st.lists(st.tuples(NAMES, TEXTS)))
def test_a_query_gives_its_pairs_in_order(pairs: list[tuple[str, str]]) -> None:
    expected = [(name, value.encode()) for name, value in pairs]
    assert query_pairs(urlencode(pairs)) == expected
    assert [p.name for p, _ in as_parameters(expected)] == [name for name, _ in pairs]


@given(st.text(st.characters(codec="ascii")))
def test_any_query_is_read_or_is_the_clients_mistake(query: str) -> None:
    try:
        first_values(query)
    except BadRequest:
        assert "%" in query


@pytest.mark.parametrize(
    ("query", "pairs"),
    [
        ("k", [("k", b"")]),
        ("k=", [("k", b"")]),
        ("=v", [("v", b"")]),
        ("a=1;b=2", [("a", b"1"), ("b", b"2")]),
        ("&&a=1&", [("a", b"1")]),
        ("a=b+c%2B", [("a", b"b c+")]),
        ("a=1=2", [("a", b"1=2")]),
        ("a=%ff", [("a", b"\xff")]),
    ],
)
def test_odd_queries_mean_what_they_mean_to_multi_model_server(
    query: str, pairs: list[tuple[str, bytes]]
) -> None:
    assert query_pairs(query) == pairs


def test_the_first_of_a_repeated_name_counts_for_the_server() -> None:
    assert first_values("a=1&a=2&b=%ff") == {"a": "1", "b": "\ufffd"}


# URL-encoded forms


@given(st.binary(), st.sampled_from([quote_from_bytes, percent_every_byte, barely_encoded]))
def test_a_value_of_any_bytes_arrives_however_it_is_encoded(
    value: bytes, encode: Callable[[bytes], str]
) -> None:
    body = b"a=" + encode(value).encode("latin-1") + b"&b=1"
    assert seen(URLENCODED, body) == {"a": (value, None), "b": (b"1", None)}


@given(st.lists(st.tuples(NAMES, TEXTS)))
def test_fields_arrive_and_the_last_of_a_name_wins(pairs: list[tuple[str, str]]) -> None:
    expected = {name: (value.encode(), None) for name, value in pairs}
    assert seen(URLENCODED, urlencode(pairs).encode()) == expected


@given(st.binary())
def test_any_form_is_read_or_is_the_clients_mistake(body: bytes) -> None:
    try:
        seen(URLENCODED, body)
    except BadRequest as error:
        assert str(error).endswith(".")


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b"", {}),
        (b"a", {}),
        (b"a&b=1", {"a": b"", "b": b"1"}),
        (b"a=1&b", {"a": b"1"}),
        (b"a=1;b=2", {"a": b"1;b=2"}),
        (b"a=1=2", {"a": b"1=2"}),
        (b"a=1\r\n", {"a": b"1"}),
        (b"\r\n", {}),
        (b"a+b=c+d", {"a b": b"c d"}),
        (b"\xff=\xfe%FD", {"\ufffd": b"\xfe\xfd"}),
    ],
)
def test_odd_forms_mean_what_they_mean_to_multi_model_server(
    body: bytes, fields: dict[str, bytes]
) -> None:
    found = seen("Application/X-WWW-Form-URLEncoded;charset=latin-1", body)
    assert found == {name: (value, None) for name, value in fields.items()}


@pytest.mark.parametrize("body", [b"=1", b"a=1&=2&b=3", b"a=%zz", b"a=%e", b"%=1"])
def test_a_broken_form_is_the_clients_mistake(body: bytes) -> None:
    with pytest.raises(BadRequest):
        body_parameters(URLENCODED, body)


def test_the_number_of_fields_has_a_limit() -> None:
    assert len(body_parameters(URLENCODED, b"&".join([b"a=1"] * MAX_FIELDS))) == MAX_FIELDS
    with pytest.raises(BadRequest, match=str(MAX_FIELDS)):
        body_parameters(URLENCODED, b"&" * MAX_FIELDS)


# Multipart forms


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1).filter(
                lambda name: not set('\\"\x85') & set(name)
            ),
            st.binary().filter(lambda value: b"--B" not in value),
            st.none() | st.sampled_from(['"x.bin"', '""', "x.bin", '"a\\"b; name=z"', '"dé.bin"']),
            st.none() | st.sampled_from(["image/jpeg", "application/json"]),
        ),
        max_size=6,
    )
)
def test_parts_arrive_as_they_are(
    parts: list[tuple[str, bytes, str | None, str | None]],
) -> None:
    body = b"".join(part(*one) for one in parts) + END
    expected: Seen = {}
    for name, value, filename, media_type in parts:
        is_file = filename is not None
        expected[name] = (value, (media_type or "application/octet-stream") if is_file else None)
    assert seen(MULTIPART, body) == expected


@given(st.lists(st.binary().filter(lambda value: b"--B" not in value), min_size=1, max_size=4))
def test_a_form_written_with_bare_line_feeds_is_read_too(values: list[bytes]) -> None:
    body = b"".join(
        b'--B\nContent-Disposition: form-data; name="%d"\nX-A: b\n\n%b\n' % (number, value)
        for number, value in enumerate(values)
    )
    expected = {str(number): (value, None) for number, value in enumerate(values)}
    assert seen(MULTIPART, body + b"--B--\n") == expected


@given(st.binary(), st.binary(max_size=20))
def test_any_multipart_body_is_read_or_is_the_clients_mistake(body: bytes, cut: bytes) -> None:
    for candidate in (body, b"--B" + body, part("a", body), part("a", b"1") + cut + END):
        try:
            seen(MULTIPART, candidate)
        except BadRequest as error:
            assert str(error).endswith(".")


def test_values_are_views_into_the_body() -> None:
    body = part("f", b"x" * 10_000, '"f"') + END
    ((_, value),) = body_parameters(MULTIPART, body)
    assert isinstance(value, memoryview)
    assert value.obj is body


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b"", {}),
        (END, {}),
        (b"--B--", {}),
        (b"hello\r\n" + part("a", b"1") + END, {"a": (b"1", None)}),
        (part("a", b"1") + END + b"epilogue", {"a": (b"1", None)}),
        (part("a", b"1") + b"--B--", {"a": (b"1", None)}),
        (part("a", b"") + END, {"a": (b"", None)}),
        (part("a", b"", '"f"') + END, {"a": (b"", "application/octet-stream")}),
        (part("a", b"1") + part("a", b"2") + END, {"a": (b"2", None)}),
        (
            part("a", b"x\r\n--Bx\r\n", '"f"') + END,
            {"a": (b"x\r\n--Bx\r\n", "application/octet-stream")},
        ),
        (part("a", b"\xff\xfe") + END, {"a": (b"\xff\xfe", None)}),
        (
            part("a", b"\xe9", None, "text/plain; charset=latin-1") + END,
            {"a": ("é".encode(), None)},
        ),
        (
            part("a", b"\xe9", '"f"', "text/plain; charset=latin-1") + END,
            {"a": (b"\xe9", "text/plain; charset=latin-1")},
        ),
        (
            part("a", b"1", "x; filename*=UTF-8''%e4%bd%a0") + END,
            {"a": (b"1", "application/octet-stream")},
        ),
        (part("a\"; filename*=\"UTF-8''x", b"1") + END, {"a": (b"1", "application/octet-stream")}),
        (part('a\\"b', b"1") + END, {'a"b': (b"1", None)}),
        (part("a%22b", b"1") + END, {"a%22b": (b"1", None)}),
    ],
)
def test_odd_multipart_forms_are_read(body: bytes, fields: Seen) -> None:
    assert seen(MULTIPART, body) == fields


@pytest.mark.parametrize(
    "content_type",
    [
        'multipart/form-data; boundary="B"',
        "Multipart/Form-Data;Boundary=B;charset=utf-8",
        "multipart/form-data; charset=utf-8; boundary=B",
    ],
)
def test_the_boundary_is_found_however_it_is_written(content_type: str) -> None:
    assert seen(content_type, part("a", b"1") + END) == {"a": (b"1", None)}


@pytest.mark.parametrize(
    "body", [b"", b"no form at all", part("a", b"1").replace(b"--B", b"--C") + b"--C--"]
)
def test_a_multipart_form_without_its_boundary_is_empty(body: bytes) -> None:
    assert body_parameters(MULTIPART, body) == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (part("a", b"1"), "cut off"),
        (part("a", b"1")[:-4], "cut off"),
        (part("a", b"1").replace(b"\r\n", b"\n"), "cut off"),
        (part("a", b"1").replace(b"\r\n", b"\r") + END, "cannot be read"),
        (b"--B\r\n\r\nv\r\n" + END, "Part 1 .* Content-Disposition"),
        (part("a", b"1") + b"--B\r\nContent-Disposition: form-data\r\n\r\nv\r\n" + END, "Part 2"),
        (b'--B\r\nContent-Disposition: attachment; name="a"\r\n\r\nv\r\n' + END, "Part 1"),
        (b"--B\r\nno header\r\n\r\nv\r\n" + END, "cannot be read"),
        (part("a", b"1", None, "text/plain; charset=nonsense") + END, "charset 'nonsense'"),
        (part("a", b"1", None, "text/plain; charset=punycode") + END, "charset 'punycode'"),
        (part("a", b"\xff", None, "text/plain; charset=utf-16") + END, "not text in utf-16"),
    ],
)
def test_a_broken_multipart_form_is_the_clients_mistake(body: bytes, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        body_parameters(MULTIPART, body)


def test_an_endless_boundary_is_refused() -> None:
    with pytest.raises(BadRequest, match="too long"):
        body_parameters(f"multipart/form-data; boundary={'b' * 300}", b"x")


def test_the_number_of_parts_has_a_limit() -> None:
    assert len(body_parameters(MULTIPART, part("a", b"1") * 1000 + END)) == 1000
    with pytest.raises(BadRequest, match=str(MAX_FIELDS)):
        body_parameters(MULTIPART, part("a", b"1") * (MAX_FIELDS + 2) + END)
    with pytest.raises(BadRequest, match=str(MAX_FIELDS)):  # parts that are none
        body_parameters(MULTIPART, part("a", b"\r\n--Bx" * (MAX_FIELDS + 2)) + END)


@pytest.mark.parametrize("blanks", [b" ", b"\t", b" \t" * 1000])
def test_a_boundary_that_blanks_follow_is_refused(blanks: bytes) -> None:
    with pytest.raises(BadRequest, match="blanks follow"):
        body_parameters(MULTIPART, part("a", b"1") + b"--B" + blanks + b"\r\n" + END)
    assert seen(MULTIPART, part("a", b"x--B y") + END) == {"a": (b"x--B y", None)}


def test_options_of_a_header_are_taken_apart() -> None:
    assert options('x; a="never closed; b=1') == {"a": "never closed; b=1"}
    assert options('x; a="\\') == {"a": "\\"}
    header = 'form-data; Name="a;\\"b\\\\"; x=1 ; y = \'z\'; name=second; flag'
    assert options(header) == {"name": 'a;"b\\', "x": "1", "y": "'z'"}
