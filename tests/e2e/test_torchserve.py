"""Archives of torch-model-archiver, registered with a real server."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.e2e.server import Server

OWN = """
from ts.context import Context
from ts.metrics.dimension import Dimension
from ts.utils.util import PredictionException, load_label_mapping

class Other:
    pass

class Own:
    def initialize(self, context):
        assert isinstance(context, Context)
        self.names = load_label_mapping("index_to_name.json")

    def handle(self, data, context):
        context.metrics.add_metric("Seen", len(data), "count", dimensions=[Dimension("A", "b")])
        numbers = [row.get("data") or row.get("body") for row in data]
        if b"bad" in numbers:
            raise PredictionException("not a class", 418)
        return [{"name": self.names[str(int(bytes(number)))]} for number in numbers]
"""


def write(path: Path, files: Mapping[str, str], handler: str, **entries: str) -> Path:
    model = {"modelName": path.stem, "handler": handler, "modelVersion": "1.0", **entries}
    manifest = {"runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_handler_of_torchserve_is_registered_and_answers(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    files = {"own.py": OWN, "index_to_name.json": '{"7": ["n07", "seven"]}', "w.pt": ""}
    write(server.store / "net.mar", files, "own.py", serializedFile="w.pt")
    server.load("net.mar")
    answer = server.predict("net", b"7")
    assert (answer.status, answer.json()) == (200, {"name": "seven"})
    assert server.predict("net", b"bad").status == 418


def test_what_cannot_be_served_is_refused_by_name(start_server: Callable[..., Server]) -> None:
    server = start_server()
    write(server.store / "segments.mar", {"w.pt": ""}, "image_segmenter", serializedFile="w.pt")
    reply = server.register("segments.mar")
    assert (reply.status, reply.json()["type"]) == (400, "InvalidModelException")
    assert "TorchServe's own handler 'image_segmenter' has no equal here" in reply.message
    assert server.names() == []
