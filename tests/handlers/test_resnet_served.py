"""ResNets behind the real server: what clients send, and archives that cannot be served."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

import numpy  # noqa: E402 - comes with torchvision
from PIL import Image  # noqa: E402

from mmserve.cli import archiver  # noqa: E402
from tests.e2e.server import Reply, Server  # noqa: E402

pytestmark = pytest.mark.torch

RECIPE = {"size": 16, "mean": [0.5], "std": [0.25], "labels": ["ant", "bee", "cat", "dog"]}
PIXELS = numpy.arange(24 * 20 * 3, dtype=numpy.uint8).reshape(20, 24, 3)


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    found: dict[str, Any] = torchvision.models.resnet18(num_classes=4).state_dict()
    return found


def archive(store: Path, name: str, weights: bytes, said: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.pt").write_bytes(weights)
        Path(folder, "model.json").write_text(json.dumps(said))
        words = ["--model-name", name, "--model-path", folder, "--export-path", str(store)]
        assert archiver.main([*words, "--handler", "mmserve_handlers.resnet:handle"]) == 0


def saved(what: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def picture(form: str = "PNG", size: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    shown = Image.fromarray(PIXELS)
    (shown.resize(size) if size else shown).save(file, form)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    numpy.save(file, array)
    return file.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    home = Path(tempfile.mkdtemp(prefix="mmserve-resnet-", dir="/tmp"))
    properties = {"preload_imports": "torch,torchvision", "default_response_timeout_seconds": 60}
    running = Server(home, properties)
    try:
        running.saw("Model server started.")
        archive(running.store, "pets", saved(state()), RECIPE)
        running.load("pets.mar")
        yield running
    finally:
        running.close()
        shutil.rmtree(home, ignore_errors=True)


def ask(
    server: Server,
    body: bytes,
    content_type: str = "",
    say: str = "",
    model: str = "pets",
    **headers: str,
) -> Reply:
    """Args: say: beside the body, in the one header that SageMaker passes on."""
    sent = {"Content-Type": content_type} if content_type else {}
    sent |= {"X-Amzn-SageMaker-Custom-Attributes": say} if say else {}
    return server.ask("POST", f"/predictions/{model}", body, {**sent, **headers})


def form(**fields: tuple[str, bytes]) -> tuple[bytes, str]:
    parts = []
    for name, (kind, value) in fields.items():
        head = (
            f'Content-Disposition: form-data; name="{name}"; filename="x"\r\nContent-Type: {kind}'
        )
        parts.append(b"--edge\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n")
    return b"".join(parts) + b"--edge--\r\n", "multipart/form-data; boundary=edge"


def test_an_image_is_the_same_in_every_envelope(server: Server) -> None:
    file = picture()
    text = base64.b64encode(file).decode()
    wanted = ask(server, file, "image/png").json()["predictions"]
    assert len(wanted) == 3
    for body, kind in (
        (file, ""),
        (file, "application/octet-stream"),
        (json.dumps({"image": text}).encode(), "application/json"),
        (json.dumps({"b64": text}).encode(), "application/json"),
        form(data=("image/png", file)),
        form(photo=("application/octet-stream", file)),
        (npy(PIXELS), "application/x-npy"),
    ):
        reply = ask(server, body, kind)
        assert reply.headers["content-type"] == "application/json"
        assert reply.json()["predictions"] == wanted
    several = ask(server, json.dumps({"instances": [{"b64": text}] * 2}).encode())
    assert len(several.json()["predictions"]) == 2
    body, kind = form(image=("image/png", file), top_k=("text/plain", b"1"))
    assert ask(server, body, kind).json()["predictions"] == wanted[:1]
    assert ask(server, file, "image/png", "top_k=1").json()["predictions"] == wanted[:1]
    by_query = server.ask(
        "POST", "/models/pets/invoke?top_k=2", file, {"Content-Type": "image/png"}
    )
    assert by_query.json()["predictions"] == wanted[:2]


def test_numbers_come_as_an_array_where_accept_says_so(server: Server) -> None:
    reply = ask(server, picture(), "image/png", Accept="application/x-npy")
    assert reply.headers["content-type"] == "application/x-npy"
    chances = numpy.load(io.BytesIO(reply.body), allow_pickle=False)
    assert chances.shape == (4,) and abs(chances.sum() - 1) < 1e-5
    reply = ask(server, picture(), "image/png", "task=features", Accept="application/x-npy")
    assert numpy.load(io.BytesIO(reply.body), allow_pickle=False).shape == (512,)


@pytest.mark.parametrize(
    ("body", "kind", "status", "text"),
    [
        (b"%PDF-1.7 and so on", "image/jpeg", 400, "body: is not an image that can be read: it lo"),
        (picture("JPEG")[:500], "image/jpeg", 400, "body: is a"),
        (b'{"image": "@"}', "application/json", 400, "image: is a text, but not base64"),
        (b'{"image": [[1, 2], [3]]}', "application/json", 400, "image[1]: must be a row of 2"),
        (npy(numpy.zeros((3, 5, 5), "f4")), "application/x-npy", 400, "it must be (3, 16, 16)"),
        (npy(numpy.array([{}])), "application/x-npy", 400, "only plain numbers are taken"),
        (picture(size=(1, 300)), "image/png", 413, "one side is at most 200 times"),
        (picture(size=(9000, 4000)), "image/png", 413, "9000 × 4000 pixels; at most 32000000"),
        (b"", "image/png", 400, "body: is "),
    ],
)
def test_a_mistake_is_answered_and_the_worker_lives_on(
    server: Server, body: bytes, kind: str, status: int, text: str
) -> None:
    before = server.workers("pets")
    reply = ask(server, body, kind)
    assert reply.status == status and text in reply.message
    assert ask(server, picture("WEBP", (1, 1)), "image/webp").status == 200
    assert server.workers("pets") == before


@pytest.mark.parametrize(
    ("name", "weights", "said", "text"),
    [
        ("cut", lambda: saved(state())[:5000], RECIPE, "model.pt is damaged or cut short"),
        ("vgg", lambda: saved({"a": torch.zeros(1)}), RECIPE, "not the weights of a ResNet"),
        ("fifty", lambda: saved(state()), {"architecture": "resnet50"}, "those of a resnet18"),
        ("two", lambda: saved(state()), {"labels": ["a", "b"]}, "there are 2 labels, and the"),
        ("typo", lambda: saved(state()), {"sise": 3}, '"sise" is no known key'),
    ],
)  # fmt: skip
def test_an_archive_that_cannot_be_served_says_why(
    server: Server, name: str, weights: Any, said: Any, text: str
) -> None:
    archive(server.store, name, weights(), said)
    reply = server.register(f"{name}.mar", initial_workers=1, synchronous=True)
    assert reply.status == 500
    assert text in reply.message
    assert ask(server, picture(), "image/png").status == 200


def test_nan_is_an_error_of_the_model_and_its_worker_lives_on(server: Server) -> None:
    broken = state()
    broken["fc.bias"][2] = float("nan")
    archive(server.store, "nan", saved(broken), RECIPE)
    server.load("nan.mar")
    before = server.workers("nan")
    reply = server.predict("nan", picture(), "image/png")
    assert reply.status == 500 and "answered NaN or infinity" in reply.message
    assert ask(server, picture(), say="task=features", model="nan").status == 200
    assert server.workers("nan") == before
