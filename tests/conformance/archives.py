"""What both model stores hold. Quiet: names and contents; `conftest.py` writes them."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

Files = Mapping[str, str | bytes]

NOOP = """\
def handle(data, context):
    return None if data is None else ["ok"] * len(data)
"""

#: Tells names, types and values of what it was given, in their order.
ECHO = """\
import json

def told(value):
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, bytes(value).decode("latin-1")]
    return [type(value).__name__, value]

def handle(data, context):
    if data is None:
        return None
    return [json.dumps([[name, *told(value)] for name, value in row.items()]) for row in data]
"""

#: Does what its body says, in Python; the result is what `result` is bound to.
OBEY = """\
import json, math, os, sys, time

def handle(data, context):
    if data is None:
        return None
    names = {"data": data, "context": context, "json": json, "os": os, "sys": sys, "time": time,
             "math": math, "result": ["ok"] * len(data)}
    body = data[0]["body"]
    exec(body if isinstance(body, str) else bytes(body).decode(), names)
    return names["result"]
"""

CLASS = """\
class Service:
    def __init__(self):
        self.loads = 0

    def initialize(self, context):
        self.loads += 1
        self.batch_size = context.system_properties["batch_size"]

    def handle(self, data, context):
        return [f"{self.loads} {self.batch_size} {context.model_name}"] * len(data)
"""


def manifest(model: Mapping[str, Any] | None, **top: Any) -> str:
    """Text of a 1.0 manifest; keywords replace its other entries, None leaves one out."""
    document = {"specificationVersion": "1.0", "runtime": "python", "model": model} | top
    return json.dumps({key: value for key, value in document.items() if value is not None})


def archive(
    name: str | None, service: str, *, handler: str | None = "service:handle", **top: Any
) -> Files:
    model = {"modelName": name, "handler": handler}
    model = {key: value for key, value in model.items() if value is not None}
    return {"MAR-INF/MANIFEST.json": manifest(model, **top), "service.py": service}


def zipped(files: Files) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in files.items():
            member = zipfile.ZipInfo(name)  # a fixed time: the same bytes in every run
            member.external_attr = 0o644 << 16
            target.writestr(member, content)
    return packed.getvalue()


def load_failure(cause: str) -> Files:
    """A function handler whose load does this."""
    service = (
        f"import os, sys, time\n\ndef handle(data, context):\n    {cause}\n    return ['ok']\n"
    )
    return archive("bad", service)


#: Archives whose load fails, by what they do.
LOAD_FAILURES: Mapping[str, Files] = {
    "raises": load_failure("raise ValueError('no weights')"),
    "memory": load_failure("raise MemoryError('too big')"),
    "exits": load_failure("os._exit(3)"),
    "system-exit": load_failure("sys.exit(3)"),
    "import-error": archive("bad", "import nowhere_to_be_found\n"),
    "syntax-error": archive("bad", "def handle(data, context:\n"),
    "no-module": archive("bad", NOOP, handler="absent:handle"),
    "no-function": archive("bad", NOOP, handler="service:absent"),
    "two-classes": archive("bad", CLASS + "\nclass Other:\n    pass\n"),
    "no-initialize": archive("bad", "class Service:\n    def handle(self, data, context): ...\n"),
    "no-handle": archive("bad", "class Service:\n    def initialize(self, context): ...\n"),
    "initialize-raises": archive(
        "bad",
        "class Service:\n    def initialize(self, context):\n        raise ValueError('no')\n"
        "    def handle(self, data, context):\n        return ['ok']\n",
    ),
}

#: Archives whose handler is named in unusual ways; all of them load.
HANDLERS: Mapping[str, Files] = {
    "module": archive("h", NOOP, handler="service"),
    "file": archive("h", NOOP, handler="service.py:handle"),
    "folder": {
        "MAR-INF/MANIFEST.json": manifest({"modelName": "h", "handler": "code/mine.py:answer"}),
        "code/mine.py": NOOP.replace("handle", "answer"),
    },
    "class": archive("h", CLASS),
    "class-by-name": archive("h", CLASS, handler="service:Service"),
    "brings-modules": {
        "MAR-INF/MANIFEST.json": manifest({"modelName": "h", "handler": "service:handle"}),
        "service.py": "import utils, context, metrics\n\ndef handle(data, ctx):\n"
        "    return [utils.WORD + context.WORD + metrics.WORD] if data else None\n",
        **{f"{name}.py": f"WORD = {name!r}\n" for name in ("utils", "context", "metrics")},
    },
    "reads-a-file": {
        "MAR-INF/MANIFEST.json": manifest({"modelName": "h", "handler": "service:handle"}),
        "service.py": "WORD = open('data/word.txt').read()\n\n"
        "def handle(data, context):\n    return [WORD] if data else None\n",
        "data/word.txt": "read",
    },
}

#: Archives with a wrong or unusual manifest, or that are none.
MANIFESTS: Mapping[str, Files | bytes] = {
    "no-name": archive(None, NOOP),
    "no-handler": archive("m", NOOP, handler=None),
    "no-name-no-handler": archive(None, NOOP, handler=None),
    "bad-runtime": archive("m", NOOP, runtime="java"),
    "upper-runtime": archive("m", NOOP, runtime="PYTHON"),
    "no-runtime": archive("m", NOOP, runtime=None),
    "engine": archive("m", NOOP, engine={"engineName": "PyTorch", "engineVersion": "2"}),
    "engine-without-name": archive("m", NOOP, engine={"engineVersion": "2"}),
    "version": {
        "MAR-INF/MANIFEST.json": manifest(
            {"modelName": "m", "handler": "service:handle", "modelVersion": "3.1"},
            description="d",
            license="MIT",
            publisher={"author": "a", "email": "e"},
            userData={"a": 1},
            unheard="of",
        ),
        "service.py": NOOP,
    },
    "not-json": {"MAR-INF/MANIFEST.json": "{nonsense", "service.py": NOOP},
    "empty-manifest": {"MAR-INF/MANIFEST.json": "", "service.py": NOOP},
    "null-model": archive("m", NOOP) | {"MAR-INF/MANIFEST.json": '{"model": null}'},
    "list-manifest": {"MAR-INF/MANIFEST.json": "[]", "service.py": NOOP},
    "no-manifest": {"service.py": NOOP},
    "empty-zip": {},
    "legacy": {
        "MANIFEST.json": json.dumps(
            {
                "Engine": {"MXNet": 0.12},
                "Model": {"Model-Name": "bad", "Service": "service.py", "Signature": "s.json"},
            }
        ),
        "service.py": NOOP,
    },
    "legacy-without-service": {
        "MANIFEST.json": json.dumps({"Model": {"Model-Name": "m"}}),
        "service.py": NOOP,
    },
    "html": b"<html><body>not an archive</body></html>",
    "empty-file": b"",
    "cut-off": zipped(archive("m", NOOP))[:120],
    "climbs-out": archive("m", NOOP) | {"../../climbed.txt": "x"},
    "absolute": archive("m", NOOP) | {"/climbed/absolute.txt": "x"},
    "upper-name": archive("Upper.Case-1_x", NOOP),
}


def files_of_store() -> dict[str, Files | bytes]:
    """Every entry of both model stores: a directory of files, or a file's bytes."""
    entries: dict[str, Files | bytes] = {
        "noop.mar": zipped(archive("noop", NOOP)),
        "echo.mar": zipped(archive("echo", ECHO)),
        "obey.mar": zipped(archive("obey", OBEY)),
        "folder": archive("folder", NOOP),
        "deep/er/noop.mar": zipped(archive("noop", NOOP)),
        "folder-without-manifest": {"service.py": NOOP},
        "readme.txt": b"text",
    }
    for kind, group in (
        ("fails", LOAD_FAILURES),
        ("handler", HANDLERS),
        ("manifest", MANIFESTS),
    ):
        for name, content in group.items():
            # Its own bytes for each, so that no two unpack into one place.
            marked = content if isinstance(content, bytes) else {**content, "mark.txt": kind + name}
            packed = marked if isinstance(marked, bytes) else zipped(marked)
            entries[f"{kind}-{name}.mar"] = b"" if name == "empty-file" else packed
    entries["manifest-empty-zip.mar"] = zipped({})
    return entries
