"""The ResNet handler with weights as they are drawn: what it reads, refuses and answers."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

from PIL import Image  # noqa: E402 - comes with torchvision

from mmserve_handlers import resnet  # noqa: E402 - only where torch is
from mmserve_handlers.contract import BadInput  # noqa: E402
from tests.handlers.calls import Context, answers  # noqa: E402

pytestmark = pytest.mark.torch

RECIPE = {
    "architecture": "resnet18",
    "labels": ["zero", "one", "two", "three"],
    "size": 16,
    "mean": [0.5],
    "std": [0.25],
    "full_scale": 16,
}
DIGIT = [[(3 * x + 5 * y) % 17 for x in range(8)] for y in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("resnet")
    torch.manual_seed(3)
    network = torchvision.models.resnet18(num_classes=4)
    torch.save(network.state_dict(), made / "model.pt")
    (made / "model.json").write_text(json.dumps(RECIPE))
    return made


@pytest.fixture(scope="module")
def context(folder: Path) -> Iterator[Context]:
    made = Context(folder)
    assert resnet.handle(None, made) is None
    yield made
    resnet._service = None


def ask(context: Context, *bodies: Any) -> list[Any]:
    context.statuses.clear()
    return answers(resnet.handle([{"body": body} for body in bodies], context))


def picture(mode: str = "L", form: str = "PNG", size: tuple[int, int] = (8, 8)) -> bytearray:
    file = io.BytesIO()
    Image.new(mode, size).save(file, form)
    return bytearray(file.getvalue())


def test_labels_come_with_probabilities_most_likely_first(context: Context) -> None:
    (found,) = ask(context, {"image": DIGIT, "top_k": 4})
    chances = [one["probability"] for one in found["predictions"]]
    assert sorted(one["label"] for one in found["predictions"]) == sorted(RECIPE["labels"])
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(1, abs=1e-4)


def test_an_image_is_the_same_in_every_form(context: Context) -> None:
    forms = [DIGIT, {"image": DIGIT}, bytearray(json.dumps(DIGIT).encode()), json.dumps(DIGIT)]
    found = ask(context, *forms)
    assert len(found[0]["predictions"]) == resnet.TOP_K
    assert all(one == found[0] for one in found)
    (several,) = ask(context, {"images": [DIGIT, DIGIT]})
    assert several["predictions"] == [found[0]["predictions"]] * 2


def test_a_picture_file_is_read_as_the_numbers_in_it(context: Context) -> None:
    file = io.BytesIO()
    grey = bytes(round(value / 16 * 255) for row in DIGIT for value in row)
    Image.frombytes("L", (8, 8), grey).save(file, "PNG")
    by_file, by_numbers = ask(context, bytearray(file.getvalue()), {"image": DIGIT})
    for one, other in zip(by_file["predictions"], by_numbers["predictions"], strict=True):
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"], abs=0.02)


@pytest.mark.parametrize(
    ("mode", "form"),
    [("L", "PNG"), ("1", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG"),
     ("RGB", "JPEG"), ("CMYK", "JPEG")],
)  # fmt: skip
def test_pictures_of_every_colour_mode_are_read(context: Context, mode: str, form: str) -> None:
    (found,) = ask(context, picture(mode, form, (30, 20)))
    assert len(found["predictions"]) == resnet.TOP_K


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "image"),
        ({"image": []}, "image"),
        ({"image": [[]]}, "image"),
        ({"image": "x"}, "image"),
        ({"image": [[1, 2], [3]]}, "image[1]"),
        ({"image": [[1, "2"]]}, "image[0]"),
        ({"image": [[1, True]]}, "image[0]"),
        ({"image": [[1, 17]]}, "image[0]"),
        ({"image": [[1, -0.1]]}, "image[0]"),
        ({"image": [[1, float("nan")]]}, "image[0]"),
        ({"images": []}, "images"),
        ({"images": [DIGIT, [[1], [2, 3]]]}, "images[1][1]"),
        ({"images": [DIGIT] * (resnet.MAX_IMAGES + 1)}, "images"),
        ({"image": DIGIT, "top_k": 0}, "top_k"),
        ({"image": DIGIT, "top_k": 5}, "top_k"),
        ({"image": DIGIT, "top_k": True}, "top_k"),
        (bytearray(b"{bad"), "body"),
        (bytearray(b"GIF89a..."), "body"),
        (picture()[:40], "body"),
        (picture(size=(8000, 8000)), "body"),
        (bytearray(), "body"),
    ],
)
def test_a_mistake_is_refused_and_the_field_named(context: Context, body: Any, field: str) -> None:
    with pytest.raises(BadInput) as caught:
        resnet.read({"body": body}, 16, 4)
    assert caught.value.field == field
    bad, good = ask(context, body, DIGIT)
    assert context.statuses == {0: 400}
    assert bad["message"].startswith(f"{field}: ")
    assert len(good["predictions"]) == resnet.TOP_K


def test_weights_are_read_from_safetensors_too(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(torch.load(folder / "model.pt", weights_only=True), tmp_path / "model.safetensors")
    (tmp_path / "model.json").write_text(json.dumps(RECIPE))
    one = resnet.Service(Context(folder)).handle([{"body": DIGIT}], Context(folder))
    assert resnet.Service(Context(tmp_path)).handle([{"body": DIGIT}], Context(tmp_path)) == one


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path, "ran").touch, ())

    (tmp_path / "model.json").write_text(json.dumps(RECIPE))
    torch.save({"fc.weight": Evil()}, tmp_path / "model.pt")
    with pytest.raises(Exception, match=r"weights_only|Weights only|WeightsUnpickler"):
        resnet.Service(Context(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"architecture": "vgg"}, "architecture must be one of resnet18"),
        ({"architecture": None}, "no 'architecture'"),
        ({"labels": None}, "no 'labels'"),
        ({"labels": []}, "labels"),
        ({"size": "x"}, "size|invalid"),
        ({"mean": 3}, "wrong kind"),
        ({"std": [0]}, "std"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(tmp_path: Path, changed: Any, text: str) -> None:
    said = {key: value for key, value in {**RECIPE, **changed}.items() if value is not None}
    (tmp_path / "model.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=text):
        resnet.recipe(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.json; write one like \{") as caught:
        resnet.recipe(tmp_path)
    assert str(tmp_path) not in str(caught.value)
    (tmp_path / "model.json").write_text(json.dumps(RECIPE))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors nor model\.pt") as missing:
        resnet.Service(Context(tmp_path))
    assert str(tmp_path) not in str(missing.value)


def test_the_recipes_that_are_shown_work(tmp_path: Path) -> None:
    blocks = re.findall(r"^ *```json\n(.*?)^ *```", Path("README.md").read_text(), re.M | re.S)
    in_the_readme = [text for text in blocks if "architecture" in text]
    assert len(in_the_readme) == 1
    for shown in (resnet.EXAMPLE, *in_the_readme):
        (tmp_path / "model.json").write_text(shown)
        found = resnet.recipe(tmp_path)
        assert found.architecture == "resnet18" and found.full_scale == 255
