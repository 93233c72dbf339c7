"""Images of a request: read, checked, and prepared for a network.

A request brings one of

    a PNG, JPEG or WebP file                          as the body, or as a field of a form
    {"image": "<base64>"}                             such a file in base64
    {"image": {"b64": "<base64>"}}, {"b64": …}        the same, as TensorFlow Serving writes it
    {"image": [[0, 5, …], …]}                         rows of numbers, or of [red, green, blue]
    {"images": [ … ]}, {"instances": [ … ]}           several, each in one of the forms above
    an `.npy` file or safetensors                     pixels or a prepared image, one or several

Files are read as `Image.open(file).convert("RGB")` reads them: grey becomes three equal channels,
CMYK and palettes become RGB, and transparency is left out, not laid over a background. Two things
differ: the camera's orientation (EXIF) is applied, and of 16 bits the upper 8 count, where Pillow
makes all that is brighter than 255 white. Of what moves the first picture counts.

Arrays of uint8 are pixels, 0 to 255: (height, width), (channels, height, width) or (height, width,
channels) with 1 or 3 channels, and one axis more in front for several. Arrays of floats are images
that are prepared already, (3, height, width) as the network takes them, and go in untouched.
Of safetensors the only tensor counts, or the one called `image`, `images` or `pixel_values`.

How many pixels an image has is known before it is decoded, and too many are refused then.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.transforms import functional  # type: ignore[import-untyped,unused-ignore]

from mmserve_handlers import inputs
from mmserve_handlers.contract import (
    PAYLOAD_KEYS,
    BadInput,
    Context,
    Item,
    TooLarge,
    named_payload,
    parse_json,
)

#: Images of one request at most, and pixels of one at most, before it is scaled.
MAX_IMAGES = 64
MAX_PIXELS = 32_000_000
#: Pixels of all images of a request, in images of the greatest size: decoding takes time.
MAX_FULL_IMAGES = 4
#: Sides longer than this many times the other one become huge when the short side is scaled.
MAX_STRETCH = 200
#: Only these: every decoder more is one more that strangers can feed.
FORMATS = ("PNG", "JPEG", "WEBP")
SEND = "send a PNG, JPEG or WebP image"
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "nearest-exact")
#: Where the images are, in a form and in JSON.
KEYS = (*PAYLOAD_KEYS, "image", "images")
TENSOR_NAMES = ("image", "images", "pixel_values")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

#: What files are that were called `.jpg` all the same, by their first bytes.
_LOOKS_LIKE = (
    (b"%PDF", "a PDF"),
    (b"GIF8", "a GIF"),
    (b"BM", "a BMP"),
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"PK\x03\x04", "a zip"),
    (b"\x1f\x8b", "gzip"),
    (b"<", "HTML or XML"),
)
_BRANDS = {b"avif": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"isom": "a video"}

#: An RGB picture; or a tensor (3, height, width), of uint8 or of float from 0 to 1.
Pixels = Image.Image | torch.Tensor


class Preparation(Protocol):
    """How pixels become what a network takes."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """What comes out: channels, height, width."""

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        """float32, of `shape`."""


class ResizeAndCrop(NamedTuple):
    """As the transforms of torchvision's weights: scale the short side, cut out the middle.

    Source: torchvision.transforms._presets.ImageClassification.
    """

    resize: int
    crop: int
    mean: Sequence[float]
    std: Sequence[float]
    interpolation: str = "bilinear"
    antialias: bool = True

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.crop, self.crop

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        mode = functional.InterpolationMode(self.interpolation)
        scaled = functional.resize(pixels, [self.resize], mode, antialias=self.antialias)
        cut = functional.center_crop(scaled, [self.crop, self.crop])
        if isinstance(cut, Image.Image):
            cut = functional.pil_to_tensor(cut)
        values = functional.convert_image_dtype(cut, torch.float32)
        done: torch.Tensor = functional.normalize(values, self.mean, self.std)
        return done


class Square(NamedTuple):
    """Scaled to a square whatever its shape, for networks that were trained so."""

    size: int
    mean: Sequence[float]
    std: Sequence[float]

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def __call__(self, pixels: Pixels) -> torch.Tensor:
        if isinstance(pixels, Image.Image):
            pixels = functional.pil_to_tensor(pixels)
        values = functional.convert_image_dtype(pixels, torch.float32)
        # Antialiased where it shrinks, as torchvision's own transforms do.
        scaled = torch.nn.functional.interpolate(
            values.unsqueeze(0),
            size=(self.size, self.size),
            mode="bilinear",
            align_corners=False,
            antialias=True,
        )[0]
        done: torch.Tensor = functional.normalize(scaled, self.mean, self.std)
        return done


class Asked(NamedTuple):
    """One request: its images, prepared, and what else it says."""

    images: list[torch.Tensor]
    is_list: bool
    options: dict[str, Any]


def read(
    item: Item,
    context: Context,
    index: int,
    prepare: Preparation,
    *,
    options: Sequence[str] = (),
    full_scale: float = 255,
    max_pixels: int = MAX_PIXELS,
) -> Asked:
    """One request, checked. Each image is prepared before the next one is decoded.

    Args:
        options: names of what a request may say beside its images: in JSON, in a form, in the query
            or in the header of custom attributes; those that are there come back, unchecked.
        full_scale: the brightest value of images that come as rows of numbers.
        max_pixels: of one image.

    Raises:
        TooLarge: an image has too many pixels, or the request too many images.
        BadInput: names the field that is wrong.
    """
    beside = inputs.attributes(context.get_request_header(index, inputs.ATTRIBUTES))
    said: dict[str, Any] = {name: beside[name] for name in options if name in beside}
    said |= {name: inputs.option(item, name) for name in options if name in item}
    rest = {name: value for name, value in item.items() if name not in options}
    content_type = context.get_request_header(index, "content-type")
    field, value = named_payload(rest, content_type, KEYS)
    reading = _Reading(prepare, full_scale, max_pixels)
    if isinstance(value, bytes | bytearray | memoryview):
        kind = inputs.kind_of(value, inputs.media_type_of(context, index, field))
        if kind == "file":
            return Asked([reading.file(value, field)], False, said)
        if kind != "json":
            images, is_list = reading.arrays(_tensor(value, kind, field), field)
            return Asked(images, is_list, said)
        value = parse_json(value, field)
    elif isinstance(value, str) and value.lstrip()[:1] in ("{", "[", '"'):
        value = parse_json(value, field)
    if isinstance(value, list) and value and isinstance(value[0], str | dict):
        value = {"images": value}
    elif not isinstance(value, dict):
        value = {"image": value}
    elif "b64" in value and "image" not in value:
        value = {**value, "image": value["b64"]}
    said |= {name: value[name] for name in options if name in value}
    for name in ("images", "instances"):
        if name in value:
            return Asked(reading.several(value[name], name), True, said)
    if "image" not in value:
        raise BadInput("image", f"is missing; {SEND} as the body, in base64, or rows of numbers")
    return Asked([reading.one(value["image"], "image")], False, said)


class _Reading:
    """What reads the images of one request, and counts their pixels."""

    def __init__(self, prepare: Preparation, full_scale: float, max_pixels: int) -> None:
        self.prepare, self.full_scale, self.max_pixels = prepare, full_scale, max_pixels
        self.left = MAX_FULL_IMAGES * max_pixels

    def several(self, values: Any, field: str) -> list[torch.Tensor]:
        if not isinstance(values, list) or not values:
            raise BadInput(field, "must be a list of images")
        _check_count(len(values), field)
        return [self.one(value, f"{field}[{i}]") for i, value in enumerate(values)]

    def one(self, value: Any, field: str) -> torch.Tensor:
        """One image of a JSON document."""
        if isinstance(value, dict) and len(value) == 1:
            (name,) = value
            # {"image_bytes": {"b64": …}} is what signatures of TensorFlow Serving look like.
            if name == "b64" or isinstance(value[name], dict):
                return self.one(value[name], f"{field}.{name}")
        if isinstance(value, str):
            return self.file(inputs.from_base64(value, field), field)
        return self.prepare(self._rows(value, field))

    def file(self, raw: inputs.Bytes, field: str) -> torch.Tensor:
        return self.prepare(decoded(raw, field, self._check_size))

    def arrays(self, tensor: torch.Tensor, field: str) -> tuple[list[torch.Tensor], bool]:
        """Images of an array, and whether there may be several."""
        if tensor.dtype == torch.uint8:
            is_list = tensor.dim() == 4
            if not is_list and tensor.dim() not in (2, 3):
                raise _wrong_shape(tensor, field, self.prepare.shape)
            images = list(tensor) if is_list else [tensor]
        elif tensor.dtype in FLOATS:
            is_list = tensor.dim() == 4
            if tuple(tensor.shape[is_list:]) != self.prepare.shape:
                raise _wrong_shape(tensor, field, self.prepare.shape)
            images = list(tensor.to(torch.float32)) if is_list else [tensor.to(torch.float32)]
        else:
            raise BadInput(
                field,
                f"is an array of {_name(tensor.dtype)}; send pixels as uint8, or an image that is "
                f"prepared already as float32, float16, bfloat16 or float64",
            )
        if not images:
            raise BadInput(field, "is an array without images in it")
        _check_count(len(images), field)
        if tensor.dtype == torch.uint8:
            return [self.prepare(self._colours(one, field)) for one in images], is_list
        for place, one in enumerate(images):
            if not torch.isfinite(one).all():
                raise BadInput(f"{field}[{place}]" if is_list else field, "has NaN or infinity")
        return images, is_list

    def _colours(self, pixels: torch.Tensor, field: str) -> torch.Tensor:
        """uint8, (3, height, width); the channels are where 1 or 3 of them are."""
        if pixels.dim() == 2:
            pixels = pixels.unsqueeze(0)
        elif pixels.shape[0] not in (1, 3):
            if pixels.shape[2] not in (1, 3):
                raise _wrong_shape(pixels, field, self.prepare.shape)
            pixels = pixels.permute(2, 0, 1)
        height, width = pixels.shape[1:]
        if not height or not width:
            raise _wrong_shape(pixels, field, self.prepare.shape)
        self._check_size(width, height, field)
        return pixels.expand(3, -1, -1).contiguous()

    def _rows(self, value: Any, field: str) -> torch.Tensor:
        """Rows of numbers, or of [red, green, blue], as float from 0 to 1, (3, height, width)."""
        if not isinstance(value, list) or not value or not isinstance(value[0], list):
            raise BadInput(field, "must be base64 or a list of rows of numbers")
        if not value[0]:
            raise BadInput(f"{field}[0]", "is an empty row")
        width, is_grey = len(value[0]), not isinstance(value[0][0], list)
        self._check_size(width, len(value), field)
        wanted = f"numbers from 0 to {self.full_scale:g}"
        for index, row in enumerate(value):
            if not isinstance(row, list) or len(row) != width:
                raise BadInput(f"{field}[{index}]", f"must be a row of {width}, as the first is")
            numbers = row
            if not is_grey:
                if any(not isinstance(pixel, list) or len(pixel) != 3 for pixel in row):
                    raise BadInput(f"{field}[{index}]", "must hold [red, green, blue], as [0][0]")
                numbers = [number for pixel in row for number in pixel]
            # `True` is no brightness, and of NaN no comparison holds.
            if not {*map(type, numbers)} <= {int, float} or not all(
                0 <= number <= self.full_scale for number in numbers
            ):
                raise BadInput(f"{field}[{index}]", f"must hold {wanted}")
        pixels = torch.tensor(value, dtype=torch.float32) / self.full_scale
        return pixels.expand(3, -1, -1) if is_grey else pixels.permute(2, 0, 1).contiguous()

    def _check_size(self, width: int, height: int, field: str) -> None:
        pixels = width * height
        if pixels > self.max_pixels:
            raise TooLarge(
                field,
                f"is an image of {width} × {height} pixels; at most {self.max_pixels} are taken",
            )
        if max(width, height) > MAX_STRETCH * min(width, height):
            raise TooLarge(
                field,
                f"is an image of {width} × {height} pixels, and too large when its short side is "
                f"scaled: one side is at most {MAX_STRETCH} times the other",
            )
        self.left -= pixels
        if self.left < 0:
            raise TooLarge(
                field,
                "has more pixels than are taken: the images of a request have at most "
                f"{MAX_FULL_IMAGES * self.max_pixels} together",
            )


class _CheckSize(Protocol):
    def __call__(self, width: int, height: int, field: str) -> None: ...


def decoded(raw: inputs.Bytes, field: str, check_size: _CheckSize) -> Image.Image:
    """A PNG, JPEG or WebP file as an upright RGB picture.

    Args:
        check_size: called with width, height and field before anything is decoded.

    Raises:
        TooLarge: from `check_size`, or the picture is beyond what Pillow opens.
        BadInput: it is no such file, or broken.
    """
    with warnings.catch_warnings():
        # Of tags that are broken, and of sizes, which are checked here.
        warnings.simplefilter("ignore")
        try:
            picture: Image.Image = Image.open(io.BytesIO(raw), formats=FORMATS)
        except Image.DecompressionBombError:
            raise TooLarge(field, "is an image of more pixels than are taken") from None
        except UnidentifiedImageError:
            why = f"is not an image that can be read{_looks(raw)}; {SEND}"
            raise BadInput(field, why) from None
        # A broken file makes Pillow raise of many kinds: OSError, SyntaxError, ValueError and more.
        except Exception:
            raise BadInput(field, f"is a broken image; {SEND}") from None
        with picture:
            check_size(*picture.size, field=field)
            try:
                picture.load()
            except MemoryError:
                raise
            except Exception:
                why = f"is a {picture.format} image that is broken or cut short"
                raise BadInput(field, why) from None
            return _rgb(_upright(picture))


def _upright(picture: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(picture)
    except MemoryError:
        raise
    except Exception:
        return picture  # the tags are broken; the picture is not


def _rgb(picture: Image.Image) -> Image.Image:
    if picture.mode.startswith("I"):
        values = numpy.asarray(picture)
        if values.dtype.byteorder == ">":
            values = values.astype(values.dtype.newbyteorder("="))
        picture = Image.fromarray((values.clip(0, 65535) >> 8).astype(numpy.uint8))
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _looks(raw: inputs.Bytes) -> str:
    start = bytes(raw[:16])
    named = next((name for magic, name in _LOOKS_LIKE if start.startswith(magic)), None)
    if start[4:8] == b"ftyp":
        named = _BRANDS.get(start[8:12], "a video")
    return f": it looks like {named}" if named else ""


def _tensor(raw: inputs.Bytes, kind: inputs.Kind, field: str) -> torch.Tensor:
    if kind == "npy":
        array = inputs.npy_array(raw, field)
        if array.dtype.kind not in "iufb":
            raise BadInput(field, f"is an array of {array.dtype}; send uint8 or floats")
        if not array.flags.writeable:  # torch would warn of it
            array = array.copy()
        try:
            return torch.from_numpy(array)
        except TypeError:  # float128 and the like
            raise BadInput(field, f"is an array of {array.dtype}; send uint8 or floats") from None
    tensors = inputs.safetensors(raw, field)
    for name in TENSOR_NAMES if len(tensors) > 1 else tensors:
        if name in tensors:
            return tensors[name]
    names = ", ".join(TENSOR_NAMES)
    raise BadInput(field, f"has {len(tensors)} tensors; send one, or call one of them {names}")


def _check_count(count: int, field: str) -> None:
    if count > MAX_IMAGES:
        raise TooLarge(field, f"has {count} images; at most {MAX_IMAGES} are taken")


def _wrong_shape(tensor: torch.Tensor, field: str, shape: tuple[int, int, int]) -> BadInput:
    wanted = (
        "(height, width) or three axes with 1 or 3 channels"
        if tensor.dtype == torch.uint8
        else f"{shape}, prepared as the network takes it"
    )
    return BadInput(
        field,
        f"is an array of {_name(tensor.dtype)} of shape {tuple(tensor.shape)}; it must be {wanted},"
        " or one axis more in front for several",
    )


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
