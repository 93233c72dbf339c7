"""The models that the servers under test load."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

NOOP_SERVICE = """\
def handle(data, context):
    return None if data is None else ["ok"] * len(data)
"""

#: As a user of Multi Model Server writes it: `from_pretrained`, nothing tuned.
BERT_SERVICE = '''\
"""Sentence vectors of a BERT model."""

import os

import torch
from transformers import BertModel


class Embedder:
    def __init__(self):
        self.model = None

    def initialize(self, context):
        self.model = BertModel.from_pretrained(context.system_properties["model_dir"])
        self.model.eval()

    def handle(self, data, context):
        ids = torch.tensor([row["body"]["ids"] for row in data])
        with torch.no_grad():
            vectors = self.model(input_ids=ids).last_hidden_state.mean(dim=1)
        return [{"pid": os.getpid(), "vector": vector.tolist()[:8]} for vector in vectors]


_service = Embedder()


def handle(data, context):
    if _service.model is None:
        _service.initialize(context)
    return None if data is None else _service.handle(data, context)
'''

#: One sentence of 32 tokens.
BERT_REQUEST = json.dumps({"ids": list(range(1000, 1032))}).encode()
JSON_TYPE = (("Content-Type", "application/json"),)

_WRITE_BERT = """\
import json, sys
import torch
from transformers import BertConfig, BertModel
torch.manual_seed(0)
BertModel(BertConfig(**json.loads(sys.argv[2]))).save_pretrained(sys.argv[1])
"""


class ModelsMissing(Exception):
    """The libraries that make a model are not installed."""


def manifest(name: str) -> str:
    model = {"modelName": name, "handler": "service:handle"}
    return json.dumps({"specificationVersion": "1.0", "runtime": "python", "model": model})


def write_noop(store: Path) -> str:
    """A model that answers `ok`. Returns its `url`."""
    with zipfile.ZipFile(store / "noop.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("MAR-INF/MANIFEST.json", manifest("noop"))
        archive.writestr("service.py", NOOP_SERVICE)
    return "noop.mar"


#: A BERT that is no load for anybody.
SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}


def write_bert(store: Path, *, small: bool = False) -> str:
    """The directory `bert`: BERT-base, random weights, 438 MB of safetensors. Returns its `url`.

    Another process makes it: torch's threads and memory have no place in the generator.

    Raises:
        ModelsMissing: torch or transformers is not there.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ModelsMissing("BERT needs torch and transformers: pip install 'mmserve[handlers]'")
    folder = store / "bert"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF/MANIFEST.json").write_text(manifest("bert"), encoding="utf-8")
    (folder / "service.py").write_text(BERT_SERVICE, encoding="utf-8")
    made = subprocess.run(
        [sys.executable, "-c", _WRITE_BERT, str(folder), json.dumps(SMALL if small else {})],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        raise ModelsMissing(f"BERT-base could not be written:\n{made.stderr[-3000:]}")
    return folder.name


def site_packages() -> str:
    """Where this interpreter has torch, for the `PYTHONPATH` of a server that has none."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise ModelsMissing("torch is not installed")
    return str(Path(found.origin).parent.parent)


def pack(folder: Path, archive: Path, method: Literal["deflated", "stored"]) -> None:
    """Packs a model directory; deflated and without `__pycache__`, as `model-archiver` does it."""
    compression = zipfile.ZIP_DEFLATED if method == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(archive, "w", compression) as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.parent.name != "__pycache__":
                packed.write(path, path.relative_to(folder))


def renew(archive: Path, number: int) -> None:
    """Makes the archive one that no server has seen, without packing it again."""
    with zipfile.ZipFile(archive, "a") as packed:
        packed.writestr(f"round-{number}.txt", f"{number}\n")
