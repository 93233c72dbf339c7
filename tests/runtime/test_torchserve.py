"""Archives as torch-model-archiver makes them, in a worker: their handlers import `ts`."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from mmserve.runtime.torchserve import BUILTIN, UNSERVED, is_torchserve
from mmserve.wire.messages import Loaded, LoadFailed
from tests.runtime.workers import Process, Request

Model = Callable[[Mapping[str, str]], Path]

NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.first(x).relu())
"""

# As users extend it: names of steps and of what they find are TorchServe's.
HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler

class Mine(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        assert self.initialized and not self.model.training
        self.scale = self.model_yaml_config["handler"]["scale"]

    def preprocess(self, requests):
        rows = [request.get("data") or request.get("body") for request in requests]
        return torch.tensor(rows, dtype=torch.float32) * self.scale

class Helper:
    pass
"""

# Writes net.pth, net.pt (TorchScript), whole.pth (a pickled module) and the same answers as JSON.
WRITER = """
import json, sys, torch
sys.path.insert(0, ".")
from net import Net
torch.manual_seed(7)
net = Net().eval()
torch.save(net.state_dict(), "net.pth")
torch.save(net.state_dict(), "old.pth", _use_new_zipfile_serialization=False)
torch.save(net, "whole.pth")
torch.jit.script(net).save("net.pt")
from safetensors.torch import save_file
save_file(net.state_dict(), "net.safetensors")
rows = [[1.0, 2.0], [3.0, -4.0]]
with torch.inference_mode():
    json.dump([net(torch.tensor(rows)).tolist(), net(torch.tensor(rows) * 2).tolist()], sys.stdout)
"""


def manifest(handler: str, **entries: str) -> str:
    model = {"modelName": "net", "handler": handler, "modelVersion": "1.0", **entries}
    fields = {"createdOn": "01/02/2025 03:04:05", "runtime": "python", "model": model}
    return json.dumps({**fields, "archiverVersion": "0.12.0"})


def load(start: Callable[..., Process], directory: Path, text: str, **fields: Any) -> Any:
    process = start()
    process.hello()
    handler = json.loads(text)["model"]["handler"]
    process.loaded = process.load(directory, handler, manifest=text, **fields)
    return process


def body(value: object) -> Request:
    return Request(json.dumps(value).encode(), "application/json")


# Without torch

PLAIN = """
import logging
from ts.context import Context
from ts.handler_utils.timer import timed
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes
from ts.utils.util import PredictionException, list_classes_from_module, load_label_mapping

class Plain:
    def initialize(self, context):
        assert isinstance(context, Context)
        self.context = context
        self.names = load_label_mapping("index_to_name.json")
        properties = context.system_properties
        self.said = [properties["batch_size"], properties["gpu_id"],
                     properties["limit_max_image_pixels"], context.manifest["model"]["modelName"],
                     context.model_yaml_config["limit"]]

    @timed
    def handle(self, data, context):
        if data[0]["body"] == "no":
            raise PredictionException("not this", 422)
        metrics, size = context.metrics, [Dimension("Size", "small")]
        metrics.add_metric("Distance", 3, "km", dimensions=size)
        metrics.add_metric("Distance", 4, "km", dimensions=size)
        metrics.add_metric(name="Heat", value=3, unit="C", metric_type=MetricTypes.GAUGE)
        metrics.add_time("Took", 2, None, "ms", size)
        metrics.add_size("Weight", 5, None, "MB")
        metrics.add_counter("Loops", 1)
        metrics.add_percent("Share", 50)
        cached = metrics.add_metric_to_cache("Kept", "count", ["Kind"], MetricTypes.COUNTER)
        cached.add_or_update(2, ["odd"])
        cached.add_or_update(3, ["odd"])
        context.set_response_content_type(0, "text/x-said")
        context.set_response_status(201, "Said", 0)
        context.set_response_header(0, "x-who", context.get_request_header(0, "X-Who"))
        return [" ".join(map(str, [*self.said, self.names["1"]]))]
"""


def test_context_metrics_and_utilities_are_torchserves(
    model: Model, start: Callable[..., Process]
) -> None:
    directory = model(
        {
            "plain.py": PLAIN,
            "config.yaml": "limit: 9\nbatchSize: 4\n",
            "index_to_name.json": '{"0": "a", "1": ["n01", "b"]}',
        }
    )
    text = manifest("plain.py", configFile="config.yaml")
    worker = load(start, directory, text, batch_size=2)
    assert isinstance(worker.loaded, Loaded), worker.loaded
    worker.send(Request(b"yes", "text/plain", [("x-who", "me")]))
    replies, (answer,) = worker.replies()
    assert answer.text == "2 None True net 9 b"
    assert (answer.outcome.status, answer.outcome.phrase) == (201, "Said")
    assert dict(answer.outcome.headers) == {"content-type": "text/x-said", "x-who": "me"}
    lines = {line.split("|")[0]: line for line in replies.metrics}
    assert {
        "Distance.km:7",
        "Heat.C:3",
        "Took.Milliseconds:2",
        "Weight.Megabytes:5",
        "Loops.Count:1",
        "Share.Percent:50",
        "Kept.Count:5",
    } <= set(lines)
    assert "Size:small" in lines["Distance.km:7"] and "Kind:odd" in lines["Kept.Count:5"]
    assert any(line.startswith("ts_handler_handle.Milliseconds:") for line in lines)
    assert worker.ask(Request(b"no", "text/plain")).error == (422, "not this")
    assert worker.end() == 0
    assert "sets batchSize: not heeded" in worker.err


def test_a_module_level_entry_point_is_called_while_the_model_loads(
    model: Model, start: Callable[..., Process]
) -> None:
    source = """
    seen = []
    def entry(data, context):
        seen.append(data)
        return None if not data else [str(seen[0])]
    """
    text = manifest("own.py:entry", serializedFile="w.pt")
    worker = load(start, model({"own.py": source}), text)
    assert worker.ask(b"x").text == "None"


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_a_handler_without_an_equal_is_named_when_it_is_imported(
    name: str, model: Model, start: Callable[..., Process]
) -> None:
    directory = model({"own.py": f"from ts.torch_handler.{name} import Anything\n"})
    loaded = load(start, directory, manifest("own.py", modelFile="x.py")).loaded
    assert isinstance(loaded, LoadFailed)
    assert f"ts.torch_handler.{name} is not served here: bring a handler" in loaded.cause


@pytest.mark.parametrize("module", ["protocol.otf_message_handler", "handler_utils.utils"])
def test_answers_in_pieces_are_refused_by_name(
    module: str, model: Model, start: Callable[..., Process]
) -> None:
    directory = model({"own.py": f"from ts.{module} import send_intermediate_predict_response\n"})
    loaded = load(start, directory, manifest("own.py", modelFile="x.py")).loaded
    assert isinstance(loaded, LoadFailed) and "Answers in pieces" in loaded.cause


def test_ts_is_ours_in_workers_only() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('ts'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mmserve" not in done.stdout


def test_an_archive_of_multi_model_server_is_none_of_torchserve() -> None:
    assert not is_torchserve({"model": {"modelName": "m", "handler": "service:handle"}})
    assert not is_torchserve(None)
    assert is_torchserve(json.loads(manifest("h.py")))
    assert not set(BUILTIN) & set(UNSERVED)


# With torch


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with a small model in each form, and what it answers."""
    directory = tmp_path_factory.mktemp("net")
    files = {"net.py": NET, "own.py": HANDLER, "config.yaml": "handler:\n  scale: 2\n"}
    for name, text in files.items():
        (directory / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", WRITER], cwd=directory, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return directory, json.loads(done.stdout)


def answers(worker: Process) -> list[list[float]]:
    rows = worker.predict(body([1.0, 2.0]), body([3.0, -4.0]))
    return [pytest.approx(json.loads(row.text), abs=1e-5) for row in rows]


@pytest.mark.torch
@pytest.mark.parametrize(
    "files",
    [
        {"modelFile": "net.py", "serializedFile": "net.pth"},
        {"modelFile": "net.py", "serializedFile": "old.pth"},
        {"modelFile": "net.py", "serializedFile": "net.safetensors"},
        {"serializedFile": "net.pt"},
    ],
    ids=["state dict", "state dict of torch before 1.6", "safetensors", "TorchScript"],
)
def test_a_handler_that_extends_the_base_handler_answers_a_batch(
    files: dict[str, str], net: tuple[Path, Any], start: Callable[..., Process]
) -> None:
    directory, (_, doubled) = net
    text = manifest("own.py", configFile="config.yaml", **files)
    worker = load(start, directory, text, batch_size=2)
    assert isinstance(worker.loaded, Loaded), worker.loaded
    assert answers(worker) == doubled
    worker.send(body([1.0, 2.0]))
    replies, _ = worker.replies()
    assert any(line.startswith("HandlerTime.Milliseconds:") for line in replies.metrics)


@pytest.mark.torch
def test_weights_that_need_code_are_refused_and_the_code_is_not_run(
    net: tuple[Path, Any], start: Callable[..., Process]
) -> None:
    text = manifest("base_handler", modelFile="net.py", serializedFile="whole.pth")
    loaded = load(start, net[0], text).loaded
    assert isinstance(loaded, LoadFailed)
    assert "whole.pth can be read only by running code that it names (net.Net)" in loaded.cause
    assert "torch.save(model.state_dict()" in loaded.cause


CLASSIFIER = """
import sys, torch
from torch import nn

class Means(nn.Module):
    def forward(self, x):
        return x.mean((2, 3)) * 5

torch.jit.script(Means()).save("means.pt")
from PIL import Image
Image.new("RGB", (300, 260), (250, 10, 10)).save("red.png")
"""


@pytest.mark.torch
def test_image_classifier_needs_no_handler_in_the_archive(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    (tmp_path / "write.py").write_text(CLASSIFIER)
    subprocess.run([sys.executable, "write.py"], cwd=tmp_path, check=True)
    (tmp_path / "write.py").unlink()
    (tmp_path / "index_to_name.json").write_text('{"0": "red", "1": "green", "2": "blue"}')
    text = manifest("image_classifier", serializedFile="means.pt")
    worker = load(start, tmp_path, text, batch_size=2)
    assert isinstance(worker.loaded, Loaded), worker.loaded
    image = (tmp_path / "red.png").read_bytes()
    parts = [("data", image, None)]
    for answer in worker.predict(Request(image, "image/png"), Request(parameters=parts)):
        likely = json.loads(answer.text)
        assert sorted(likely) == ["blue", "green", "red"]
        assert likely["red"] > 0.99 and sum(likely.values()) == pytest.approx(1, abs=1e-4)


DETECTOR = """
import torch
from torch import nn

class Boxes(nn.Module):
    def forward(self, images):
        assert all(image.max() <= 1 for image in images)
        return [
            {
                "boxes": torch.tensor([[0.0, 0, image.shape[2], image.shape[1]], [0, 0, 1, 1]]),
                "labels": torch.tensor([2, 1]),
                "scores": torch.tensor([0.75, 0.25]),
            }
            for image in images
        ]
"""

# Extends a handler as users do: an `__init__` of its own, and a step.
OWN_DETECTOR = """
from ts.torch_handler.object_detector import ObjectDetector

class Mine(ObjectDetector):
    def __init__(self):
        self.threshold = 0.5

    def postprocess(self, data):
        return [{"found": found} for found in super().postprocess(data)]
"""

IMAGES = """
from PIL import Image
for name, size in {"wide": (30, 20), "high": (20, 30)}.items():
    Image.new("RGB", size, (250, 10, 10)).save(f"{name}.png")
"""


@pytest.mark.torch
def test_a_subclass_of_object_detector_takes_images_of_several_sizes(
    tmp_path: Path, start: Callable[..., Process]
) -> None:
    subprocess.run([sys.executable, "-c", IMAGES], cwd=tmp_path, check=True)
    files = {"boxes.py": DETECTOR, "own.py": OWN_DETECTOR, "index_to_name.json": '{"2": "cat"}'}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    worker = load(start, tmp_path, manifest("own.py", modelFile="boxes.py"), batch_size=2)
    assert isinstance(worker.loaded, Loaded), worker.loaded
    images = [(tmp_path / f"{name}.png").read_bytes() for name in ("wide", "high")]
    wide, high = [json.loads(answer.text)["found"] for answer in worker.predict(*images)]
    assert wide == [{"cat": [0.0, 0.0, 30.0, 20.0], "score": 0.75}]
    assert high == [{"cat": [0.0, 0.0, 20.0, 30.0], "score": 0.75}]
