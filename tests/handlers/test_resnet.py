"""The ResNet handler answers as torchvision and transformers do, on the same weights."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")
sklearn_datasets = pytest.importorskip("sklearn.datasets")

import numpy  # noqa: E402 - comes with torchvision
from PIL import Image  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from mmserve_handlers import resnet  # noqa: E402 - only where torch is
from tests.handlers.calls import Context, answers  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = [(640, 427), (224, 224), (31, 90), (1, 1)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in a worker. Two that wait for each other by spinning are slow where others work too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(name: str, classes: int = 7, seed: int = 3) -> Any:
    """A network with random weights, and statistics that are none of a fresh one."""
    torch.manual_seed(seed)
    network = getattr(torchvision.models, name)(num_classes=classes)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return network.eval()


def photos() -> list[Image.Image]:
    """Real photographs, in unlike sizes."""
    shown = [Image.fromarray(one) for one in sklearn_datasets.load_sample_images().images]
    return [shown[i % 2].resize(size) for i, size in enumerate(SIZES)]


def png(picture: Image.Image) -> bytearray:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    return bytearray(file.getvalue())


def npy(array: Any) -> bytearray:
    file = io.BytesIO()
    numpy.save(file, array)
    return bytearray(file.getvalue())


def write(folder: Path, network: Any, said: Any = None, labels: str = "") -> Path:
    torch.save(network.state_dict(), folder / "model.pt")
    if said is not None:
        (folder / "model.json").write_text(json.dumps(said))
    if labels:
        (folder / "labels.txt").write_text(labels)
    return folder


def alike(one: Any, other: Any) -> bool:
    """Whether two answers have the same labels, and probabilities as near as batches allow."""
    return [p["label"] for p in one["predictions"]] == [
        p["label"] for p in other["predictions"]
    ] and [p["probability"] for p in one["predictions"]] == pytest.approx(
        [p["probability"] for p in other["predictions"]], abs=1e-5
    )


class Asking:
    """A loaded model, without a server."""

    def __init__(self, folder: Path) -> None:
        self.context = Context(folder)
        self.service = resnet.Service(self.context)

    def __call__(self, *bodies: Any, **beside: Any) -> list[Any]:
        self.context.statuses.clear()
        return answers(self.service.handle([{"body": b, **beside} for b in bodies], self.context))

    def numbers(self, *bodies: Any, **beside: Any) -> list[Any]:
        """The same, as arrays."""
        self.context.headers["accept"] = "application/x-npy"
        data = [{"body": body, **beside} for body in bodies]
        files = self.service.handle(data, self.context)
        del self.context.headers["accept"]
        return [torch.from_numpy(numpy.load(io.BytesIO(file))) for file in files]


# Right


@pytest.fixture(scope="module", params=["resnet18", "resnet50"])
def torchvisions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Asking, Any]:
    network = drawn(request.param)
    folder = write(tmp_path_factory.mktemp(request.param), network)
    return Asking(folder), network


def test_answers_are_those_of_torchvisions_transforms_and_model(
    torchvisions: tuple[Asking, Any],
) -> None:
    asking, network = torchvisions
    transforms = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    with torch.inference_mode():
        wanted = [torch.softmax(network(transforms(one)[None])[0], 0) for one in photos()]
    files = [png(one) for one in photos()]
    together = asking.numbers(*files)
    alone = asking.numbers(files[0])
    (one_request,) = asking.numbers({"images": [base64.b64encode(f).decode() for f in files]})
    for place, row in enumerate(wanted):
        torch.testing.assert_close(together[place], row, atol=1e-5, rtol=0)
        torch.testing.assert_close(one_request[place], row, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone[0], wanted[0], atol=1e-5, rtol=0)


def test_features_are_what_comes_before_the_last_layer(torchvisions: tuple[Asking, Any]) -> None:
    from torchvision.models.feature_extraction import create_feature_extractor

    asking, network = torchvisions
    transforms = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    pooled = create_feature_extractor(network, ["flatten"])
    with torch.inference_mode():
        wanted = pooled(transforms(photos()[0])[None])["flatten"][0]
    file = png(photos()[0])
    (said,) = asking({"image": base64.b64encode(file).decode(), "task": "features"})
    torch.testing.assert_close(torch.tensor(said["features"]), wanted, atol=1e-5, rtol=1e-5)
    (array,) = asking.numbers(file, task=bytearray(b"features"))
    torch.testing.assert_close(array, wanted, atol=1e-5, rtol=1e-5)


def test_what_is_prepared_by_the_client_gives_the_same(torchvisions: tuple[Asking, Any]) -> None:
    asking, _ = torchvisions
    ready = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.transforms()(photos()[0])
    by_file, by_array = asking.numbers(png(photos()[0]), npy(ready.numpy()))
    torch.testing.assert_close(by_file, by_array, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["IMAGENET1K_V2"])
def test_other_transforms_are_said_in_model_json(tmp_path: Path, name: str) -> None:
    network = drawn("resnet18")
    transforms = torchvision.models.ResNet50_Weights[name].transforms()
    asking = Asking(write(tmp_path, network, {"resize": 232}))
    with torch.inference_mode():
        wanted = torch.softmax(network(transforms(photos()[0])[None])[0], 0)
    torch.testing.assert_close(asking.numbers(png(photos()[0]))[0], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("has_processor", [True, False])
def test_answers_of_transformers_are_those_of_its_pipeline(
    tmp_path: Path, has_processor: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(4)
    names = ["cat", "dog", "eel", "fox", "gnu"]
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1, 2, 1, 1], num_labels=5,
        id2label=dict(enumerate(names)),
    )  # fmt: skip
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    processor = transformers.ConvNextImageProcessor(size={"shortest_edge": 224})
    if not has_processor:
        processor = transformers.ViTImageProcessor(
            size={"height": 96, "width": 96}, image_mean=[0.5] * 3, image_std=[0.5] * 3
        )
        said = {"size": 96, "mean": [0.5], "std": [0.5]}
        (tmp_path / "model.json").write_text(json.dumps(said))
    processor.save_pretrained(tmp_path)
    pipe = transformers.pipeline("image-classification", model=str(tmp_path))
    wanted = [{one["label"]: one["score"] for one in pipe(p, top_k=5)} for p in photos()[:4]]
    if not has_processor:
        (tmp_path / "preprocessor_config.json").unlink()
    asking = Asking(tmp_path)
    found = asking.numbers(*[png(photo) for photo in photos()[:4]])
    for scores, chances in zip(wanted, found, strict=True):
        expected = torch.tensor([scores[name] for name in names])
        # Without its processor the picture is scaled here, rounded less on the way.
        torch.testing.assert_close(chances, expected, atol=1e-5 if has_processor else 0.02, rtol=0)
    (features,) = asking.numbers(png(photos()[0]), task="features")
    assert features.shape == (128,)
    grey = [[16 * ((x + y) % 16) for x in range(20)] for y in range(20)]
    rows, array = asking.numbers({"image": grey}, npy(numpy.array(grey, "u1")))
    torch.testing.assert_close(rows, array, atol=1e-5 if has_processor else 1e-4, rtol=0)


def test_images_may_stay_of_unlike_shapes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic"
    )
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path)
    processor = transformers.BitImageProcessor(size={"shortest_edge": 48}, do_center_crop=False)
    processor.save_pretrained(tmp_path)
    asking = Asking(tmp_path)
    files = [png(photos()[place]) for place in (0, 2, 0, 1)]
    together = asking.numbers(*files)
    for file, found in zip(files, together, strict=True):
        torch.testing.assert_close(asking.numbers(file)[0], found, atol=1e-5, rtol=0)


def test_an_encoder_of_transformers_gives_features(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1], layer_type="basic"
    )
    transformers.ResNetModel(config).save_pretrained(tmp_path)
    asking = Asking(tmp_path)
    assert len(asking(png(photos()[1]))[0]["features"]) == 8
    assert "must be features" in asking(png(photos()[1]), task="classify")[0]["message"]


# Digits, as the demo trains them


def test_digits_that_were_trained_are_read_as_by_torch_alone(tmp_path: Path) -> None:
    """Its own preparation, without this package: what training did to the numbers."""
    from mmserve_handlers import demo

    known = demo.digits()
    network = demo.train(known._replace(training=known.training[:480]), lambda *_: None)
    demo.write_digits_model(tmp_path, network)
    asking = Asking(tmp_path)
    chosen = known.held_out[:60]
    every = torch.tensor(known.images[chosen], dtype=torch.float32).unsqueeze(1) / 16
    scaled = torch.nn.functional.interpolate(every, (16, 16), mode="bilinear", antialias=True)
    with torch.inference_mode():
        wanted = torch.softmax(network((scaled.expand(-1, 3, -1, -1) - 0.5) / 0.25), 1)
    (found,) = asking.numbers({"images": known.images[chosen].tolist()})
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    right = (found.argmax(1) == torch.tensor(known.labels[chosen])).float().mean()
    assert right > 0.5  # ten classes: it has learnt


# Networks of that kind, with weights as they are drawn

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
    return write(tmp_path_factory.mktemp("digits"), drawn("resnet18", 4), RECIPE)


@pytest.fixture(scope="module")
def asking(folder: Path) -> Asking:
    return Asking(folder)


@pytest.fixture
def handle(folder: Path) -> Iterator[Callable[..., Any]]:
    yield resnet.handle
    resnet._service = None


def test_the_first_call_loads(folder: Path, handle: Callable[..., Any]) -> None:
    context = Context(folder)
    assert handle(None, context) is None
    assert len(answers(handle([{"body": DIGIT}], context))[0]["predictions"]) == resnet.TOP_K


def test_labels_come_with_probabilities_most_likely_first(asking: Asking) -> None:
    (found,) = asking({"image": DIGIT, "top_k": 4})
    chances = [one["probability"] for one in found["predictions"]]
    assert sorted(one["label"] for one in found["predictions"]) == sorted(RECIPE["labels"])
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(1, abs=1e-4)


def test_an_image_is_the_same_in_every_form(asking: Asking) -> None:
    forms = [DIGIT, {"image": DIGIT}, bytearray(json.dumps(DIGIT).encode()), json.dumps(DIGIT)]
    found = asking(*forms)
    assert len(found[0]["predictions"]) == resnet.TOP_K
    assert all(alike(one, found[0]) for one in found)
    (several,) = asking({"images": [DIGIT, DIGIT]})
    assert all(alike({"predictions": one}, found[0]) for one in several["predictions"])


def test_more_images_than_one_pass_takes_are_answered_in_order(asking: Asking) -> None:
    shifted = [[[min(16, v + i % 5) for v in row] for row in DIGIT] for i in range(50)]
    (together,) = asking.numbers({"images": shifted})
    for place in (0, 31, 32, 49):
        (alone,) = asking.numbers({"image": shifted[place]})
        torch.testing.assert_close(together[place], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0, 5, -1, True, 1.0, "x", "0", "", None, [1]])
def test_top_k_must_be_a_number_of_labels(asking: Asking, value: Any) -> None:
    bad, good = asking({"image": DIGIT, "top_k": value}, DIGIT)
    assert asking.context.statuses == {0: 400}
    assert bad["message"] == "top_k: must be a whole number from 1 to 4"
    assert len(good["predictions"]) == 3
    assert len(asking(DIGIT, top_k="4")[0]["predictions"]) == 4


def test_an_unknown_task_is_refused(asking: Asking) -> None:
    (bad,) = asking({"image": DIGIT, "task": "detect"})
    assert bad["message"] == "task: must be one of classify, features"


def test_one_bad_request_of_a_batch_fails_alone(asking: Asking) -> None:
    large = io.BytesIO()
    Image.new("1", (8000, 8000)).save(large, "PNG")
    bodies = [DIGIT, b"%PDF-1.7", png(photos()[1])[:300], bytearray(large.getvalue()), DIGIT, {}]
    first, *bad, second, empty = asking(*bodies)
    assert asking.context.statuses == {1: 400, 2: 400, 3: 413, 5: 400}
    assert alike(first, second) and alike(first, asking(DIGIT)[0])
    assert "it looks like a PDF" in bad[0]["message"]
    assert bad[1]["message"] == "body: is a PNG image that is broken or cut short"
    assert bad[2]["code"] == 413 and "8000 × 8000 pixels" in bad[2]["message"]
    assert empty["message"].startswith("image: is missing")


def test_nan_is_an_error_of_its_image_alone(tmp_path: Path) -> None:
    network = drawn("resnet18", 4)
    network.fc.bias.data[1] = float("nan")
    broken = Asking(write(tmp_path, network, RECIPE))
    for reply in broken(DIGIT, {"images": [DIGIT, DIGIT]}):
        assert reply["code"] == 500 and "answered NaN or infinity for" in reply["message"]
    assert "features" in broken(DIGIT, task="features")[0]


# Weights in every packing


def test_weights_are_the_same_in_every_packing(folder: Path, tmp_path: Path) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    (wanted,) = Asking(folder)(DIGIT)
    wrapped = {f"module.{key}": value for key, value in state.items()}
    contiguous = {key: value.contiguous() for key, value in state.items()}
    packings: dict[str, Callable[[Path], object]] = {
        "model.safetensors": lambda path: save_file(contiguous, path),
        "model.pth": lambda path: torch.save({"state_dict": wrapped, "epoch": 3}, path),
        "best.pth": lambda path: torch.save(
            {"model": {f"_orig_mod.{key}": value for key, value in state.items()}}, path
        ),
        "resnet18-f37072fd.pth": lambda path: torch.save(
            state, path, _use_new_zipfile_serialization=False
        ),
    }
    for name, save in packings.items():
        made = tmp_path / name.replace(".", "-")
        made.mkdir()
        (made / "model.json").write_text(json.dumps(RECIPE))
        save(made / name)
        assert alike(Asking(made)(DIGIT)[0], wanted), name


def mapped_from(tensor: Any) -> str:
    """The file that a tensor's memory is mapped from, or ""."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    for line in maps.read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return line.partition("/")[2]
    return ""


def test_weights_are_mapped_not_copied(folder: Path) -> None:
    network: Any = resnet.Service(Context(folder)).network.body
    assert mapped_from(network.layer4[0].conv1.weight).endswith("/model.pt")


def test_half_precision_weights_are_served_in_full(folder: Path, tmp_path: Path) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    halved = {k: v.half() if v.is_floating_point() else v for k, v in state.items()}
    torch.save(halved, tmp_path / "model.pt")
    (tmp_path / "model.json").write_text(json.dumps(RECIPE))
    wanted, found = Asking(folder).numbers(DIGIT)[0], Asking(tmp_path).numbers(DIGIT)[0]
    torch.testing.assert_close(found, wanted, atol=0.01, rtol=0)


def test_with_amp_convolutions_have_sixteen_bits_and_workers_share_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMSERVE_PREPARED_DIR", str(tmp_path / "prepared"))
    shutil.copy(folder / "model.pt", tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({**RECIPE, "precision": "amp"}))
    asking = Asking(tmp_path)
    network: Any = asking.service.network.body
    assert network.conv1.weight.dtype == torch.bfloat16
    assert network.bn1.weight.dtype == torch.float32
    assert "/prepared/" in mapped_from(network.layer4[0].conv1.weight)
    wanted = Asking(folder)
    for task in ("classify", "features"):
        (exact,), (found,) = (one.numbers(DIGIT, task=task) for one in (wanted, asking))
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact, atol=0.05 * exact.abs().max(), rtol=0)


def test_weights_without_a_last_layer_give_features(folder: Path, tmp_path: Path) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    state = {key: value for key, value in state.items() if not key.startswith("fc.")}
    torch.save(state, tmp_path / "model.pt")
    asking = Asking(tmp_path)
    assert len(asking({"image": DIGIT})[0]["features"]) == 512
    (tmp_path / "model.json").write_text('{"task": "classify"}')
    with pytest.raises(ValueError, match="have no last layer"):
        Asking(tmp_path)


@pytest.mark.parametrize("name", sorted(resnet.NAMES.values()))
def test_every_architecture_is_told_by_its_shapes(name: str) -> None:
    with torch.device("meta"):
        network = getattr(torchvision.models, name)(num_classes=9)
    shape = resnet.shape_of({key: value.shape for key, value in network.state_dict().items()})
    assert (shape.name, shape.classes) == (name, 9)
    built = {key: value.shape for key, value in shape.build().state_dict().items()}
    assert built == {key: value.shape for key, value in network.state_dict().items()}


# What an archive says


def test_labels_come_from_a_file_or_are_numbers(folder: Path, tmp_path: Path) -> None:
    said = {key: value for key, value in RECIPE.items() if key != "labels"}
    write(tmp_path, drawn("resnet18", 4), said)
    assert Asking(tmp_path).service.labels == ["0", "1", "2", "3"]
    (tmp_path / "labels.txt").write_bytes("\ufeffnull\r\nuno\r\ndue \r\ntre\r\n\r\n".encode())
    assert Asking(tmp_path).service.labels == ["null", "uno", "due", "tre"]
    said["labels"] = {"1": "b", "0": "a", "3": "d", "2": "c"}
    (tmp_path / "model.json").write_text(json.dumps(said))
    assert Asking(tmp_path).service.labels == ["a", "b", "c", "d"]


def test_the_labels_of_imagenet_are_known(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"labels": "imagenet"}')
    labels = resnet.recipe(tmp_path).labels
    assert labels is not None and len(labels) == 1000 and labels[0] == "tench"


def test_labels_that_are_not_exclusive_have_probabilities_of_their_own(tmp_path: Path) -> None:
    network = drawn("resnet18", 4)
    network.fc.bias.data[:] = 9
    asking = Asking(write(tmp_path, network, {**RECIPE, "activation": "sigmoid"}))
    assert min(asking.numbers(DIGIT)[0].tolist()) > 0.5


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"architecture": "vgg"},
            r"architecture is \"vgg\"; allowed are resnet18, resnet34, resnet50",
        ),
        ({"architecture": 3}, "architecture is 3; allowed are resnet18"),
        ({"labels": []}, "labels is .*; allowed is a list of texts"),
        ({"labels": [[1]]}, "labels is .*; allowed is a list of texts"),
        ({"labels": {"1": "a"}}, "an object names each by its place"),
        ({"size": "x"}, "size is .*; allowed are whole numbers from 1 to 4096"),
        ({"size": 0}, "size is .*; allowed are whole numbers from 1 to 4096"),
        ({"resize": 256}, "say one or the other"),
        ({"mean": "x"}, "mean is .*; allowed are one number or three"),
        ({"mean": [1, 2]}, "mean is .*; allowed are one number or three"),
        ({"mean": ["x"]}, "mean is .*; allowed are one number or three"),
        ({"std": [0]}, "std"),
        ({"full_scale": 0}, "full_scale is 0; allowed are numbers above 0"),
        ({"task": "detect"}, r"task is \"detect\"; allowed are classify, features"),
        ({"weights": "../model.pt"}, "weights is .*; allowed is the name of a file in the archive"),
        ({"sdt": [1]}, r"\"sdt\" is no known key; did you mean 'std'"),
        ({"xyzzy": 1}, r"\"xyzzy\" is no known key; known are architecture, labels"),
        ({"device": "tpu"}, "device is .*; allowed are auto, cpu, cuda and cuda:N"),
        ({"max_pixels": 0}, "max_pixels is 0; allowed are whole numbers from 1"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(tmp_path: Path, changed: Any, text: str) -> None:
    (tmp_path / "model.json").write_text(json.dumps({**RECIPE, **changed}))
    with pytest.raises(ValueError, match=rf"^model\.json: .*{text}"):
        resnet.recipe(tmp_path)


@pytest.mark.parametrize("text", ["{bad", "[]", "3"])
def test_a_recipe_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ValueError, match=r"^model\.json (is not JSON|must hold an object)"):
        resnet.recipe(tmp_path)


def test_the_recipes_that_are_shown_work(tmp_path: Path) -> None:
    blocks = re.findall(r"^ *```json\n(.*?)^ *```", Path("README.md").read_text(), re.M | re.S)
    in_the_readme = [text for text in blocks if "architecture" in text]
    assert len(in_the_readme) == 1
    for shown in in_the_readme:
        (tmp_path / "model.json").write_text(shown)
        found = resnet.recipe(tmp_path)
        assert found.architecture == "resnet18" and found.full_scale == 255


def test_the_manifest_may_say_what_model_json_says(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "model.pt", tmp_path)
    context: Any = Context(tmp_path)
    context.manifest = {"model": {"options": {"size": 16, "labels": ["a", "b", "c", "d"]}}}
    service = resnet.Service(context)
    assert (service.labels, service.prepare.shape) == (["a", "b", "c", "d"], (3, 16, 16))


def test_weights_older_than_the_counting_of_batches_are_served(
    folder: Path, tmp_path: Path
) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    plain = {key: value for key, value in state.items() if "num_batches_tracked" not in key}
    torch.save(plain, tmp_path / "model.pt")
    (tmp_path / "model.json").write_text(json.dumps(RECIPE))
    assert alike(Asking(tmp_path)(DIGIT)[0], Asking(folder)(DIGIT)[0])


def test_a_gpu_that_is_not_there_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "model.pt", tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({**RECIPE, "device": "cuda:99"}))
    with pytest.raises(ValueError, match=r'device is "cuda:99", and torch finds no such GPU'):
        Asking(tmp_path)


# What cannot be loaded


def damaged(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


@pytest.mark.parametrize(
    ("name", "spoil", "text"),
    [
        ("model.pt", damaged, "model.pt is damaged or cut short"),
        ("model.pt", lambda raw: b"", "model.pt is damaged or cut short"),
        ("model.pt", lambda raw: b"\x80\x02junk", "model.pt is damaged or cut short"),
        ("model.pt", lambda raw: bytes(4000), "model.pt is damaged or cut short"),
        ("model.safetensors", damaged, "model.safetensors is damaged or cut short"),
        ("model.safetensors", lambda raw: b"{}", "model.safetensors is damaged or cut short"),
    ],
)
def test_broken_weights_are_named(
    folder: Path, tmp_path: Path, name: str, spoil: Callable[[bytes], bytes], text: str
) -> None:
    path = tmp_path / name
    state = torch.load(folder / "model.pt", weights_only=True)
    torch.save(state, path) if name.endswith(".pt") else save_file(state, path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=text) as caught:
        Asking(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_a_pickle_that_runs_code_is_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path, "ran").touch, ())

    for legacy in (False, True):
        torch.save(
            {"fc.weight": Evil()},
            tmp_path / "model.pt",
            _use_new_zipfile_serialization=not legacy,
        )
        with pytest.raises(ValueError, match="holds something else than tensors by name"):
            Asking(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (lambda: drawn("resnet18"), "holds something else than tensors by name"),
        (lambda: [1, 2], "holds something else than tensors by name"),
        (lambda: {"epoch": 3}, "holds something else than tensors by name"),
        (dict, "holds something else than tensors by name"),
        (lambda: {"a.weight": torch.zeros(2)}, "not the weights of a ResNet .* it has a.weight"),
        (
            lambda: {**drawn("resnet18").state_dict(), "extra": torch.zeros(2)},
            'does not fit a resnet18: .*"extra"',
        ),
        (
            lambda: {**drawn("resnet18").state_dict(), "conv1.weight": torch.zeros(64, 3, 3, 3)},
            r"does not fit a resnet18: size mismatch for conv1.weight",
        ),
        (
            lambda: {
                key.replace("fc.", "fc.1."): value
                for key, value in drawn("resnet18").state_dict().items()
            },
            "the last layer must be one Linear called fc; it has fc.1.weight, fc.1.bias",
        ),
    ],
)
def test_what_is_not_the_weights_of_a_resnet_is_refused(
    tmp_path: Path, content: Callable[[], Any], text: str
) -> None:
    torch.save(content(), tmp_path / "model.pt")
    with pytest.raises(ValueError, match=rf"^model\.pt.*{text}"):
        Asking(tmp_path)


def test_torchscript_is_told_apart(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as file:  # as `torch.jit.save` leaves it
        file.writestr("model/constants.pkl", b"")
    with pytest.raises(ValueError, match=r"model\.pt is TorchScript, not tensors by name"):
        Asking(tmp_path)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"architecture": "resnet50"}, "says resnet50, and the weights are those of a resnet18"),
        ({"labels": ["a", "b"]}, "there are 2 labels, and the network has 4 outputs"),
        ({"weights": "other.pt"}, "no other.pt, which model.json calls its weights"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(
    folder: Path, tmp_path: Path, said: Any, text: str
) -> None:
    shutil.copy(folder / "model.pt", tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({**RECIPE, **said}))
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        Asking(tmp_path)


def test_labels_in_a_file_are_checked(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "model.pt", tmp_path)
    for raw, text in (
        (b"a\nb\n", "there are 2 labels, and the network has 4 outputs"),
        (b"a\n\nb\nc\n", r"labels\.txt: line 2 is empty"),
        (b"", r"labels\.txt: line 1 is empty"),
        (b"\xff\xfe", r"labels\.txt is not text in UTF-8"),
    ):
        (tmp_path / "labels.txt").write_bytes(raw)
        with pytest.raises(ValueError, match=text):
            Asking(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors, model\.pt or") as missing:
        Asking(tmp_path)
    assert str(tmp_path) not in str(missing.value)
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"several weights \(a\.pt, b\.pt\), none of them"):
        Asking(tmp_path)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "bert"}, "config.json is of a bert; this handler serves ResNets"),
        ({"model_type": "resnet"}, "the archive has no weights; looked for model.safetensors"),
        ({"model_type": "resnet", "layer_type": "x"}, "config.json cannot be used"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path: Path, config: Any, text: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        Asking(tmp_path)


def test_weights_of_another_size_than_the_config_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 8, 8], "depths": [1, 1, 1, 1]}
    made = transformers.ResNetConfig(**sizes, layer_type="basic", num_labels=3)
    transformers.ResNetForImageClassification(made).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "depths": [2, 1, 1, 1]}))
    with pytest.raises(ValueError, match=r"does not fit the ResNet of config\.json"):
        Asking(tmp_path)
    config["id2label"] = {"0": "a", "1": "b"}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"does not fit the labels of config\.json"):
        Asking(tmp_path)
    assert load_file(tmp_path / "model.safetensors")
