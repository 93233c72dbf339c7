"""Handlers that the SageMaker inference toolkit brings, in our workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mmserve.wire.messages import Loaded, LoadFailed
from tests.runtime.workers import Process, Request

pytest.importorskip("sagemaker_inference")

Model = Callable[[Mapping[str, str]], Path]
Start = Callable[..., Process]

HANDLER = "sagemaker_inference.default_handler_service"
SCRIPT = """
    import numpy

    def model_fn(model_dir):
        return {"factor": 2, "dir": model_dir}

    def predict_fn(data, model):
        return numpy.asarray(data) * model["factor"]
"""


@pytest.mark.parametrize("script", ["inference.py", "code/inference.py"])
def test_the_default_handler_finds_its_script_and_keeps_its_types(
    start: Start, model: Model, script: str
) -> None:
    process = start(env={"SAGEMAKER_MULTI_MODEL": "true"})
    process.hello()
    loaded = process.load(model({script: SCRIPT}), HANDLER, decode_input=False)
    assert isinstance(loaded, Loaded), loaded
    headers = [("Content-Type", "application/json"), ("Accept", "application/json")]
    answer = process.ask(Request(b"[1, 2]", "application/json", headers))
    assert json.loads(answer.text) == [2, 4]
    assert ("content-type", "application/json") in [
        (name.lower(), value) for name, value in answer.outcome.headers
    ]


def test_a_script_that_needs_too_much_memory_fails_the_load_for_it(
    start: Start, model: Model
) -> None:
    process = start(env={"SAGEMAKER_MULTI_MODEL": "true"})
    process.hello()
    script = "def model_fn(model_dir): raise MemoryError\ndef predict_fn(data, model): return data"
    failed = process.load(model({"inference.py": script}), HANDLER, decode_input=False)
    assert isinstance(failed, LoadFailed)
    assert failed.out_of_memory
