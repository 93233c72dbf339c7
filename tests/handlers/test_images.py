"""What requests bring: files of every kind, base64, numbers, arrays; and what is refused."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

import numpy  # noqa: E402 - comes with torchvision
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from PIL import Image  # noqa: E402
from safetensors.torch import save  # noqa: E402

from mmserve_handlers import images  # noqa: E402 - only where torch is
from mmserve_handlers.contract import BadInput, TooLarge  # noqa: E402
from tests.handlers.calls import Context  # noqa: E402

pytestmark = pytest.mark.torch

PREPARE = images.ResizeAndCrop(40, 32, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
SHAPE = (3, 32, 32)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(tmp_path)


def colours(width: int = 48, height: int = 36) -> Image.Image:
    red, green = numpy.meshgrid(numpy.linspace(0, 255, width), numpy.linspace(0, 255, height))
    blue = 255 - red
    return Image.fromarray(numpy.stack([red, green, blue], axis=2).astype("uint8"))


def saved(picture: Image.Image, form: str = "PNG", **how: Any) -> bytearray:
    file = io.BytesIO()
    picture.save(file, form, **how)
    return bytearray(file.getvalue())


def npy(array: Any) -> bytearray:
    file = io.BytesIO()
    numpy.save(file, array)
    return bytearray(file.getvalue())


def b64(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode()


def read(context: Context, body: Any, prepare: Any = PREPARE, **how: Any) -> images.Asked:
    return images.read({"body": body}, context, 0, prepare, **how)


def pixels(raw: bytes | bytearray) -> Image.Image:
    return images.decoded(raw, "image", lambda width, height, field: None)


# Files


def test_a_file_is_prepared_as_the_transforms_of_torchvision_do(context: Context) -> None:
    transforms = torchvision.transforms._presets.ImageClassification(
        crop_size=32, resize_size=40, mean=PREPARE.mean, std=PREPARE.std
    )
    for size in ((48, 36), (1, 1), (7, 90), (500, 300)):
        picture = colours(*size)
        (found,) = read(context, saved(picture)).images
        assert torch.equal(found, transforms(picture))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_file_is_the_same_in_every_envelope(context: Context, form: str) -> None:
    raw = saved(colours(), form)
    wanted = PREPARE(Image.open(io.BytesIO(raw)).convert("RGB"))
    text = b64(raw)
    for body in (
        raw,
        bytes(raw),
        {"image": text},
        {"image": {"b64": text}},
        {"b64": text},
        {"image": {"image_bytes": {"b64": text}}},
        {"image": f"data:image/{form.lower()};base64,{text}"},
        text,
        json.dumps({"image": text}),
        bytearray(json.dumps({"b64": text}).encode()),
    ):
        asked = read(context, body)
        assert not asked.is_list
        assert torch.equal(asked.images[0], wanted)
    for body in (
        {"images": [text, {"b64": text}]},
        {"instances": [{"b64": text}, {"image_bytes": {"b64": text}}]},
        [text, {"b64": text}],
    ):
        asked = read(context, body)
        assert asked.is_list and len(asked.images) == 2
        assert all(torch.equal(image, wanted) for image in asked.images)


@pytest.mark.parametrize("name", ["data", "file", "image", "images", "photo"])
def test_a_file_may_come_as_a_field_of_a_form(context: Context, name: str) -> None:
    raw = saved(colours())
    item = {name: raw, "top_k": bytearray(b"2")}
    context.headers[name] = {"content-type": "image/png"}
    asked = images.read(item, context, 0, PREPARE, options=("top_k", "task"))
    assert asked.options == {"top_k": "2"}
    assert torch.equal(asked.images[0], PREPARE(colours()))


@pytest.mark.parametrize(
    ("mode", "form"),
    [("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("RGB", "JPEG"),
     ("L", "JPEG"), ("CMYK", "JPEG"), ("RGBA", "WEBP")],
)  # fmt: skip
def test_colours_are_what_pillow_converts_them_to(mode: str, form: str) -> None:
    picture = colours().convert(mode)
    if mode in ("LA", "RGBA"):
        picture.putalpha(90)
    raw = saved(picture, form)
    wanted = Image.open(io.BytesIO(raw)).convert("RGB")
    assert pixels(raw).tobytes() == wanted.tobytes()


def test_a_palette_with_transparency_keeps_its_colours() -> None:
    picture = colours().convert("P")
    raw = saved(picture, transparency=3)
    assert pixels(raw).tobytes() == picture.convert("RGB").tobytes()


def test_of_sixteen_bits_the_upper_eight_count() -> None:
    values = numpy.array([[0, 255, 256, 30000, 65535]], dtype=numpy.uint16)
    found = pixels(saved(Image.fromarray(values)))
    assert [found.getpixel((x, 0)) for x in range(5)] == [(v >> 8,) * 3 for v in values[0].tolist()]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_pictures_of_a_camera_held_sideways_are_upright(form: str) -> None:
    tags = Image.Exif()
    tags[0x0112] = 6  # turn a quarter clockwise
    how = {"lossless": True} if form == "WEBP" else {}
    found = pixels(saved(colours(48, 36), form, exif=tags, **how))
    assert found.size == (36, 48)
    if form != "JPEG":
        assert found.tobytes() == colours().transpose(Image.Transpose.ROTATE_270).tobytes()


def test_broken_tags_do_not_spoil_a_picture() -> None:
    raw = saved(colours(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff broken")
    assert pixels(raw).size == (48, 36)


def png_header(width: int, height: int) -> bytearray:
    """A PNG that claims a size; whatever decodes it finds nothing there."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return bytearray(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x"))


@pytest.mark.parametrize(("width", "height"), [(8000, 8000), (12000, 12000), (60000, 60000)])
def test_a_bomb_is_refused_before_it_is_decoded(context: Context, width: int, height: int) -> None:
    with pytest.raises(TooLarge, match=r"^body: is an image of .* pixels"):
        read(context, png_header(width, height))


def test_the_greatest_image_can_be_set(context: Context) -> None:
    assert read(context, saved(colours(10, 10)), max_pixels=100).images
    with pytest.raises(TooLarge, match="10 × 11 pixels; at most 100 are taken"):
        read(context, saved(colours(10, 11)), max_pixels=100)
    text = b64(saved(colours(10, 10)))
    assert read(context, {"images": [text] * 4}, max_pixels=100).images
    with pytest.raises(TooLarge, match=r"^images\[4\]: has more pixels .* at most 400 together"):
        read(context, {"images": [text] * 5}, max_pixels=100)


def test_a_line_is_refused_because_scaling_makes_it_huge(context: Context) -> None:
    for size in ((10_000, 1), (1, 10_000)):
        with pytest.raises(TooLarge, match="one side is at most 200 times the other"):
            read(context, saved(colours(*size)))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"%PDF-1.7 ...", "not an image that can be read: it looks like a PDF; send a PNG, JPEG"),
        (b"GIF89a...", "it looks like a GIF"),
        (b"\0\0\0\x20ftypheic....", "it looks like HEIC"),
        (b"<html>", "it looks like HTML"),
        (b"\xff\xd8\xff\xe0", "not an image|broken"),
        (bytes(100), "is not an image that can be read; send"),
        (saved(colours())[:-30], "is a PNG image that is broken or cut short"),
        (saved(colours(300, 300), "JPEG")[:2000], "is a JPEG image that is broken or cut short"),
        (saved(colours(), "WEBP")[:100], "is a WEBP image that is broken|is a broken image|not an"),
    ],
)
def test_what_is_no_whole_image_is_refused(context: Context, raw: bytes, message: str) -> None:
    context.content_type = "image/jpeg"
    with pytest.raises(BadInput, match=rf"^body: .*({message})"):
        read(context, raw)
    with pytest.raises(BadInput, match=rf"^images\[1\]: .*({message})"):
        read(context, {"images": [b64(saved(colours())), b64(raw)]})


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP"]), st.data())
def test_a_damaged_file_is_an_image_or_bad_input(form: str, data: st.DataObject) -> None:
    raw = saved(colours(20, 16), form)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert read(Context(Path()), raw).images[0].shape == SHAPE
    except BadInput as wrong:
        assert wrong.field == "body"


# Numbers


def test_rows_of_numbers_are_grey_or_coloured(context: Context) -> None:
    grey = [[0, 5, 16], [8.5, 1, 2]]
    wanted = PREPARE(torch.tensor(grey).expand(3, -1, -1) / 16)
    for body in (grey, {"image": grey}, {"image": [[[v] * 3 for v in row] for row in grey]}):
        assert torch.allclose(read(context, body, full_scale=16).images[0], wanted, atol=1e-6)
    assert len(read(context, {"images": [grey, grey]}, full_scale=16).images) == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "image"),
        (None, "image"),
        (3, "image"),
        ([], "image"),
        ({"image": []}, "image"),
        ({"image": [[]]}, "image[0]"),
        ({"image": "x"}, "image"),
        ({"image": {"b64": 3}}, "image.b64"),
        ({"image": {"b64": "x", "more": 1}}, "image"),
        ({"b64": "%"}, "image"),
        ({"image": [[1, 2], [3]]}, "image[1]"),
        ({"image": [[1, "2"]]}, "image[0]"),
        ({"image": [[1, True]]}, "image[0]"),
        ({"image": [[1, 17]]}, "image[0]"),
        ({"image": [[1, 10**400]]}, "image[0]"),
        ({"image": [[1, -0.1]]}, "image[0]"),
        ({"image": [[1, float("nan")]]}, "image[0]"),
        ({"image": [[[1, 2, 3], [1, 2]]]}, "image[0]"),
        ({"image": [[[1, 2, 3], 4]]}, "image[0]"),
        ({"image": [[[1, 2, 30]]]}, "image[0]"),
        ({"images": []}, "images"),
        ({"images": 3}, "images"),
        ({"instances": [{"b64": ""}]}, "instances[0].b64"),
        ({"images": [[[1]], [[1], [2, 3]]]}, "images[1][1]"),
        ({"images": [[[1]]] * (images.MAX_IMAGES + 1)}, "images"),
        (bytearray(b"{bad"), "body"),
        ("{bad", "body"),
        (bytearray(), "body"),
    ],
)
def test_a_mistake_is_refused_and_the_field_named(context: Context, body: Any, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(context, body, full_scale=16)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


# Arrays


def test_arrays_of_pixels_may_have_their_channels_first_or_last(context: Context) -> None:
    array = numpy.asarray(colours())
    first = torch.tensor(array).permute(2, 0, 1).contiguous()
    wanted = PREPARE(first)
    for body in (
        npy(array),
        npy(numpy.asfortranarray(array)),
        npy(first.numpy()),
        bytes(npy(array)),
        bytearray(save({"anything": first})),
        bytearray(save({"image": first, "other": torch.zeros(1)})),
    ):
        asked = read(context, body)
        assert not asked.is_list and torch.equal(asked.images[0], wanted)
    several = read(context, npy(numpy.stack([array, array])))
    assert several.is_list and torch.equal(several.images[1], wanted)
    grey = torch.arange(36, dtype=torch.uint8).view(6, 6)
    (found,) = read(context, npy(grey.numpy())).images
    assert torch.equal(found, PREPARE(grey.expand(3, -1, -1)))


@pytest.mark.parametrize("kind", ["<f4", ">f4", "<f2", "<f8"])
def test_arrays_of_floats_are_prepared_already(context: Context, kind: str) -> None:
    ready = numpy.random.default_rng(1).normal(size=SHAPE).astype(kind)
    (found,) = read(context, npy(ready)).images
    assert found.dtype == torch.float32
    assert found.tolist() == ready.astype("f4").tolist()
    several = read(context, npy(numpy.stack([ready, ready])))
    assert several.is_list and [tuple(one.shape) for one in several.images] == [SHAPE] * 2


def test_bfloat16_comes_in_safetensors(context: Context) -> None:
    ready = torch.randn(SHAPE).to(torch.bfloat16)
    (found,) = read(context, bytearray(save({"pixel_values": ready}))).images
    assert torch.equal(found, ready.float())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (npy(numpy.zeros((3, 32, 31), "f4")), r"of shape \(3, 32, 31\); it must be \(3, 32"),
        (npy(numpy.zeros((32, 32, 3), "f4")), "prepared as the network takes it"),
        (npy(numpy.zeros((32, 32), "f4")), "prepared as the network takes it"),
        (npy(numpy.zeros((1, 1, 3, 32, 32), "f4")), "prepared as the network takes it"),
        (npy(numpy.zeros(SHAPE, "i8")), "is an array of int64; send pixels as uint8"),
        (npy(numpy.zeros(SHAPE, "?")), "is an array of bool"),
        (npy(numpy.zeros(SHAPE, "u2")), "is an array of uint16"),
        (npy(numpy.zeros(SHAPE, "c8")), "is an array of complex64; send uint8 or floats"),
        (npy(numpy.zeros(3, "U4")), "send uint8 or floats"),
        (npy(numpy.zeros((), "u1")), r"uint8 of shape \(\)"),
        (npy(numpy.zeros((4, 4, 4), "u1")), "with 1 or 3 channels"),
        (npy(numpy.zeros((3, 0, 4), "u1")), r"shape \(3, 0, 4\)"),
        (npy(numpy.zeros((0, 3, 4, 4), "u1")), "without images"),
        (npy(numpy.zeros((65, 3, 4, 4), "u1")), "has 65 images; at most 64"),
        (npy(numpy.zeros((3, 6000, 6000), "u1")), "6000 × 6000 pixels; at most"),
        (npy(numpy.full(SHAPE, numpy.nan, "f4")), "has NaN or infinity"),
        (npy(numpy.zeros(SHAPE, "f4"))[:-4], "cut short"),
        (bytearray(save({"a": torch.zeros(1), "b": torch.zeros(1)})), "has 2 tensors; send one"),
        (bytearray(save({"image": torch.zeros(1)}))[:-1], "not an image|not a whole"),
    ],
)  # fmt: skip
def test_an_array_of_another_shape_or_type_is_refused(
    context: Context, body: bytearray, message: str
) -> None:
    with pytest.raises(BadInput, match=rf"^body: .*{message}"):
        read(context, body)


def test_the_media_type_says_what_a_body_must_be(context: Context) -> None:
    context.content_type = "application/x-npy"
    with pytest.raises(BadInput, match=r"not an \.npy file"):
        read(context, saved(colours()))
    context.content_type = "application/octet-stream"
    assert read(context, saved(colours())).images


def test_a_square_takes_every_kind_too(context: Context) -> None:
    square = images.Square(16, [0.5], [0.25])
    grey = [[0, 128], [255, 64]]
    by_rows = read(context, grey, square).images[0]
    by_array = read(context, npy(numpy.array(grey, "u1")), square).images[0]
    by_file = read(context, saved(Image.fromarray(numpy.array(grey, "u1"))), square).images[0]
    assert by_rows.shape == square.shape
    assert torch.allclose(by_rows, by_array, atol=1e-6) and torch.equal(by_array, by_file)


def test_options_come_from_json_the_query_or_a_header(context: Context) -> None:
    context.headers["x-amzn-sagemaker-custom-attributes"] = (
        "trace; task=classify, more = 3 ,top_k=9"
    )
    item = {"body": {"image": [[1]], "top_k": 2}, "top_k": "5", "task": "features"}
    asked = images.read(item, context, 0, PREPARE, options=("top_k", "task"))
    assert asked.options == {"top_k": 2, "task": "features"}
    asked = images.read({"body": saved(colours())}, context, 0, PREPARE, options=("more", "task"))
    assert asked.options == {"more": "3", "task": "classify"}


_WORDS = st.sampled_from(["image", "images", "instances", "b64", "image_bytes", "top_k", "x"])
_TEXT = b64(saved(colours(3, 2)))
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 300) | st.floats() | st.sampled_from([_TEXT, "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(_VALUES, st.booleans())
def test_any_json_is_images_or_bad_input(value: Any, is_text: bool) -> None:
    try:
        asked = read(Context(Path()), json.dumps(value).encode() if is_text else value)
    except BadInput:
        return
    assert asked.images and all(image.shape == SHAPE for image in asked.images)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["u1", "<f4", "<f2", "i4", "?", "c8", "U2"]),
    st.lists(st.sampled_from([0, 1, 2, 3, 5, 32]), max_size=5).filter(
        lambda shape: numpy.prod(shape) < 40_000
    ),
)
def test_any_array_is_images_or_bad_input(kind: str, shape: list[int]) -> None:
    try:
        asked = read(Context(Path()), npy(numpy.ones(shape, kind)))
    except BadInput as wrong:
        assert wrong.field == "body"
        return
    assert asked.images and all(image.shape == SHAPE for image in asked.images)
