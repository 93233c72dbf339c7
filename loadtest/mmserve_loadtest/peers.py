"""Other servers a user could run instead: what each needs, and how one model is written for it.

Quiet: paths and ports go in; files, a command and requests come out. `peer_servers` installs and
starts. A workload is the same Python function and the same bytes for every peer; only the handler
around it and the envelope of the request are the peer's own.
"""

from __future__ import annotations

import base64
import io
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import msgspec

JSON_TYPE = "application/json"
#: Module of every handler's archive or folder that has the workload's `load`.
MODULE = "bench_model"

NOOP_MODEL = """\
def load(folder):
    return lambda inputs: ["ok"] * len(inputs)
"""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A model and the one request that is sent to it.

    Attributes:
        name: of the model, in paths.
        source: a Python module. Its `load(folder)` gives a function from a list of inputs to a
            list of as many texts. An input is what the JSON says where the type is JSON, else
            bytes.
        body: of a request, before a peer's envelope.
        content_type: of `body`; None where the client sends none.
        weights: the folder that `load` is given; None where there are none.
    """

    name: str
    source: str
    body: bytes
    content_type: str | None = None
    weights: Path | None = None

    @property
    def is_json(self) -> bool:
        return self.content_type == JSON_TYPE


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A POST; `path` begins with a slash."""

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a peer is installed and started.

    Attributes:
        venv: its virtual environment.
        python: its version there, as `3.11`.
        home: a private folder, the working directory.
        ports: free ones of the loopback, as many as the peer asked for; the first is for requests.
        libraries: a folder with torch in it, for a peer that `borrows` it; else empty.
        path: what PATH is for others.
    """

    venv: Path
    python: str
    home: Path
    ports: tuple[int, ...]
    libraries: str = ""
    path: str = os.defpath

    @property
    def site(self) -> Path:
        return self.venv / "lib" / f"python{self.python}" / "site-packages"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to start.

    Attributes:
        command: its first word is a path.
        files: by path below `home`.
        links: what symbolic links below `home` point to.
        env: variables besides those of the caller.
    """

    command: tuple[str, ...]
    files: Mapping[str, bytes] = {}
    links: Mapping[str, Path] = {}
    env: Mapping[str, str] = {}


class Peer(ABC):
    """A server to compare with.

    Attributes:
        name: on the command line, and of its folder.
        title: in tables and results.
        distribution: whose version is the server's.
        requirements: for pip.
        alone: for pip too, without what these depend on.
        ports: how many it listens on.
        needs_java: of any kind that is on PATH.
        borrows: it imports torch, whatever the model: it gets that of this interpreter.
    """

    name: str
    title: str
    distribution: str
    requirements: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    ports = 1
    needs_java = False
    borrows = False

    @abstractmethod
    def setup(self, workload: Workload, place: Place) -> Setup:
        """One worker with the workload; as shipped but for addresses and folders."""

    @abstractmethod
    def request(self, workload: Workload) -> Request:
        """As a client of this server sends the workload's body."""


class LitServe(Peer):
    """A class with `predict`, FastAPI before it; JSON both ways.

    Source: LitServe's documentation, LitAPI and LitServer.
    """

    name, title, distribution = "litserve", "LitServe", "litserve"
    requirements = ("litserve==0.2.19",)

    _SERVER = """\
import base64
import litserve
from {module} import load

class Api(litserve.LitAPI):
    def setup(self, device):
        self.model = load({folder!r})

    def decode_request(self, request):
        return {decoded}

    def predict(self, one):
        return self.model([one])[0]

    def encode_response(self, output):
        return {{"output": output}}

if __name__ == "__main__":
    server = litserve.LitServer(Api(), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port={port})
"""

    def setup(self, workload: Workload, place: Place) -> Setup:
        decoded = 'request["input"]' if workload.is_json else 'base64.b64decode(request["input"])'
        server = self._SERVER.format(
            module=MODULE, folder=_folder(workload), decoded=decoded, port=place.ports[0]
        )
        return Setup(
            command=(str(place.venv / "bin/python"), "server.py"),
            files={"server.py": server.encode(), f"{MODULE}.py": workload.source.encode()},
        )

    def request(self, workload: Workload) -> Request:
        """Bytes go in base64, as JSON has no others."""
        value = (
            json.loads(workload.body)
            if workload.is_json
            else base64.b64encode(workload.body).decode()
        )
        return Request(
            path="/predict",
            body=json.dumps({"input": value}).encode(),
            headers=(("Content-Type", JSON_TYPE),),
        )


class TorchServe(Peer):
    """An archive with a handler, as Multi Model Server's, from which it comes.

    Source: TorchServe's documentation, configuration and custom service.
    """

    name, title, distribution = "torchserve", "TorchServe", "torchserve"
    # It says of itself neither that it needs these nor torch.
    requirements = ("torchserve==0.12.0", "torch-model-archiver==0.12.0", "pyyaml", "setuptools<80")
    ports = 5
    needs_java = borrows = True

    _HANDLER = """\
from {module} import load

model = None

def handle(data, context):
    global model
    if model is None:
        model = load({folder!r})
    if data is None:
        return None
    return model([row.get("body", row.get("data")) for row in data])
"""

    def setup(self, workload: Workload, place: Place) -> Setup:
        addresses = dict(zip(("inference", "management", "metrics"), place.ports[:3], strict=True))
        config = [f"{name}_address=http://127.0.0.1:{port}" for name, port in addresses.items()]
        config += [
            f"grpc_inference_port={place.ports[3]}",
            f"grpc_management_port={place.ports[4]}",
            "default_workers_per_model=1",
        ]
        return Setup(
            command=(
                *(str(place.venv / "bin/torchserve"), "--start", "--foreground"),
                *("--no-config-snapshots", "--disable-token-auth"),
                *("--ts-config", str(place.home / "bench.properties")),
                *("--model-store", str(place.home / "store")),
                *("--models", f"{workload.name}={workload.name}.mar"),
            ),
            files={
                "bench.properties": "".join(f"{line}\n" for line in config).encode(),
                f"store/{workload.name}.mar": self._archive(workload),
            },
            # Its workers are started with the first `python` on PATH.
            env={
                "PATH": f"{place.venv / 'bin'}{os.pathsep}{place.path}",
                "PYTHONPATH": place.libraries,
            },
        )

    def _archive(self, workload: Workload) -> bytes:
        manifest = {
            "runtime": "python",
            "archiverVersion": "0.12.0",
            "model": {
                "modelName": workload.name,
                "modelVersion": "1.0",
                "handler": "handler.py:handle",
            },
        }
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
            archive.writestr(
                "handler.py", self._HANDLER.format(module=MODULE, folder=_folder(workload))
            )
            archive.writestr(f"{MODULE}.py", workload.source)
        return packed.getvalue()

    def request(self, workload: Workload) -> Request:
        typed = (("Content-Type", workload.content_type),) if workload.content_type else ()
        return Request(path=f"/predictions/{workload.name}", body=workload.body, headers=typed)


class Triton(Peer):
    """The binary that nvidia-pytriton brings, with a plain model of the Python backend.

    Its own layer over it is left out: it would put a second process before the model. The binary
    finds its libraries beside the package, and the backend needs the stub of the interpreter.

    Source: Triton's documentation, Python backend and binary tensor data extension.
    """

    name, title, distribution = "triton", "Triton", "nvidia-pytriton"
    requirements = ("numpy<2",)
    alone = ("nvidia-pytriton==0.7.0",)
    ports = 3

    _MODEL = """\
import json
import os
import sys

import numpy
import triton_python_backend_utils as backend

sys.path.insert(0, os.path.dirname(__file__))
from {module} import load


class TritonPythonModel:
    def initialize(self, args):
        self.model = load({folder!r})

    def execute(self, requests):
        tensors = [backend.get_input_tensor_by_name(each, "input") for each in requests]
        inputs = [{decoded} for each in tensors]
        return [
            backend.InferenceResponse([backend.Tensor("output", as_array(text))])
            for text in self.model(inputs)
        ]


def as_array(text):
    return numpy.frombuffer(text.encode(), dtype=numpy.uint8)
"""
    _CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: 0
input [{{ name: "input", data_type: TYPE_UINT8, dims: [-1] }}]
output [{{ name: "output", data_type: TYPE_UINT8, dims: [-1] }}]
instance_group [{{ kind: KIND_CPU, count: 1 }}]
"""

    def setup(self, workload: Workload, place: Place) -> Setup:
        triton = place.site / "pytriton" / "tritonserver"
        backend, own = triton / "backends" / "python", "backends/python"
        model = f"repository/{workload.name}"
        decoded = "each.as_numpy().tobytes()"
        source = self._MODEL.format(
            module=MODULE,
            folder=_folder(workload),
            decoded=f"json.loads({decoded})" if workload.is_json else decoded,
        )
        stub = "triton_python_backend_stub"
        flags: dict[str, object] = {
            "model-repository": place.home / "repository",
            "backend-directory": place.home / "backends",
        }
        for name, port in zip(("http", "grpc", "metrics"), place.ports, strict=True):
            flags |= {f"{name}-address": "127.0.0.1", f"{name}-port": port}
        return Setup(
            command=(
                str(triton / "bin" / "tritonserver"),
                *(word for flag, value in flags.items() for word in (f"--{flag}", str(value))),
            ),
            files={
                f"{model}/config.pbtxt": self._CONFIG.format(name=workload.name).encode(),
                f"{model}/1/model.py": source.encode(),
                f"{model}/1/{MODULE}.py": workload.source.encode(),
            },
            links={
                f"{own}/libtriton_python.so": backend / "libtriton_python.so",
                f"{own}/triton_python_backend_utils.py": backend / "triton_python_backend_utils.py",
                f"{own}/{stub}": triton / "python_backend_stubs" / place.python / stub,
            },
            env={
                "PATH": f"{place.venv / 'bin'}{os.pathsep}{place.path}",
                "LD_LIBRARY_PATH": str(place.site / "nvidia_pytriton.libs"),
                "PYTHONPATH": str(place.site),
            },
        )

    def request(self, workload: Workload) -> Request:
        """KServe v2, the bytes of the body as one binary tensor, the reply's too."""
        size = len(workload.body)
        head = json.dumps(
            {
                "inputs": [
                    {
                        "name": "input",
                        "shape": [size],
                        "datatype": "UINT8",
                        "parameters": {"binary_data_size": size},
                    }
                ],
                "outputs": [{"name": "output", "parameters": {"binary_data": True}}],
            }
        ).encode()
        return Request(
            path=f"/v2/models/{workload.name}/infer",
            body=head + workload.body,
            headers=(
                ("Content-Type", "application/octet-stream"),
                ("Inference-Header-Content-Length", str(len(head))),
            ),
        )


#: By name, in the order in which they are documented.
PEERS: Mapping[str, Peer] = {peer.name: peer for peer in (TorchServe(), Triton(), LitServe())}


def noop(body: bytes) -> Workload:
    """A model that answers `ok`."""
    return Workload(name="noop", source=NOOP_MODEL, body=body)


def _folder(workload: Workload) -> str:
    return "" if workload.weights is None else str(workload.weights.absolute())
