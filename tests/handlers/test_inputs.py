from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

numpy = pytest.importorskip("numpy")

from mmserve_handlers import inputs  # noqa: E402 - only where numpy is
from mmserve_handlers.contract import BadInput  # noqa: E402
from tests.handlers.calls import Context  # noqa: E402


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


def with_header(text: str, data: bytes = b"") -> bytes:
    header = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@given(
    st.sampled_from(["u1", "<f4", ">f4", "<f2", ">i8", "?"]),
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
)
def test_arrays_come_out_as_they_went_in(kind: str, shape: list[int], is_fortran: bool) -> None:
    whole = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape).astype(kind)
    whole = numpy.asfortranarray(whole) if is_fortran else whole
    found = inputs.npy_array(npy(whole), "body")
    assert found.shape == whole.shape and found.dtype.isnative
    assert found.tolist() == whole.tolist()


@given(st.binary(max_size=200) | st.binary(max_size=120).map(lambda b: b"\x93NUMPY\x01\x00" + b))
def test_any_bytes_are_an_array_or_bad_input(data: bytes) -> None:
    for read in (inputs.npy_array, lambda raw, field: inputs.from_base64(raw.decode("l1"), field)):
        try:
            read(data, "body")
        except BadInput as wrong:
            assert wrong.field == "body"


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.path.touch, ())


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = numpy.array([Trap(tmp_path / "ran")], dtype=object)
    with pytest.raises(BadInput, match="only plain numbers"):
        inputs.npy_array(npy(trap), "body")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (npy(numpy.zeros((2, 3)))[:-1], r"cut short or too long: shape \(2, 3\) of float64 takes"),
        (npy(numpy.zeros(3)) + b"x", "cut short or too long"),
        (npy(numpy.zeros(2, dtype=[("a", "i4")])), "only plain numbers"),
        (npy(numpy.zeros(2))[:20], "not an .npy file"),
        (
            with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999,)}"),
            "imposs",
        ),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"), "impossible"),
        (with_header("{'descr': '<f4', 'fortran_order': False, 'shape': (9**9**9,)}"), "not an"),
        (
            with_header("{'descr': '|V0', 'fortran_order': False, 'shape': (3,)}"),
            "impossible|plain",
        ),
        (with_header("[" * 5000), "not an .npy file"),
        (b"", "not an .npy file"),
    ],
)
def test_an_array_that_is_not_whole_or_not_of_numbers_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=rf"^image: .*{message}"):
        inputs.npy_array(raw, "image")


def test_safetensors_are_told_apart_and_read() -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save

    raw = save({"image": torch.ones(2, 2, dtype=torch.bfloat16)})
    assert inputs.kind_of(raw) == "safetensors"
    assert inputs.safetensors(bytearray(raw), "body")["image"].tolist() == [[1, 1], [1, 1]]
    for broken in (raw[:-1], raw[:20], b"", b"\xff" * 16):
        with pytest.raises(BadInput, match="not a whole safetensors file"):
            inputs.safetensors(broken, "body")


@pytest.mark.parametrize(
    ("raw", "type_", "kind"),
    [
        (b"{}", "", "json"),
        (b" \n[1]", "application/octet-stream", "json"),
        (b"\xef\xbb\xbf[1]", "", "json"),
        (b'"abc"', "", "json"),
        (b"\x89PNG", "application/json", "json"),
        (b"{}", "image/png", "file"),
        (b"\x89PNG", "", "file"),
        (b"\x93NUMPY\x01\x00", "", "npy"),
        (b"\x89PNG", "application/x-npy", "npy"),
        (b"x", "application/vnd.safetensors", "safetensors"),
        (b"\xff\xff\0\0\0\0\0\0{", "", "file"),
        (b"", "", "file"),
    ],
)
def test_a_body_is_what_its_type_says_or_what_it_looks_like(
    raw: bytes, type_: str, kind: str
) -> None:
    assert inputs.kind_of(raw, type_) == inputs.kind_of(bytearray(raw), type_) == kind


@given(st.binary(min_size=1, max_size=60))
def test_base64_is_read_in_all_its_spellings(raw: bytes) -> None:
    plain, safe = base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()
    mime = base64.encodebytes(raw).decode()
    for text in (plain, safe, plain.rstrip("="), mime, f"data:image/png;base64,{plain}"):
        assert inputs.from_base64(text, "image") == raw


@pytest.mark.parametrize("text", ["", "=", "x", "a b c d e", "ab!d", "дом", "data:,abc", "[1]"])
def test_what_is_no_base64_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"^image: (is a text, but not base64|is empty)"):
        inputs.from_base64(text, "image")


def test_the_media_type_of_a_body_and_of_a_field(tmp_path: Path) -> None:
    context = Context(tmp_path)
    context.content_type = "Application/X-npy; a=b"
    context.headers = {"photo": {"content-type": "image/PNG"}, "odd": "text"}
    assert inputs.media_type_of(context, 0, "body") == "application/x-npy"
    assert inputs.media_type_of(context, 0, "photo") == "image/png"
    assert inputs.media_type_of(context, 0, "odd") == inputs.media_type_of(context, 0, "none") == ""


def test_options_beside_the_data_are_text() -> None:
    item = {"top_k": bytearray(b"3"), "task": "features", "bad": b"\xff"}
    assert (inputs.option(item, "top_k"), inputs.option(item, "task")) == ("3", "features")
    assert inputs.option(item, "none") is None
    with pytest.raises(BadInput, match=r"^bad: is not text in UTF-8"):
        inputs.option(item, "bad")


def test_json_is_known_by_its_start() -> None:
    assert inputs.kind_of(json.dumps({"image": "x"}).encode(), "text/plain") == "json"
