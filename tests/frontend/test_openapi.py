import json
from collections.abc import Iterator
from typing import Any

import pytest

from mmserve.frontend.openapi import (
    inference_description,
    management_description,
    model_description,
    shared_description,
)

ROOT = {"/": ["options"]}
INFERENCE = {
    "/{model_name}/predict": ["post"],
    "/ping": ["get"],
    "/predictions/{model_name}": ["post", "options"],
    "/api-description": ["get"],
    "/invocations": ["post"],
    "/models/{model_name}/invoke": ["post"],
}
MANAGEMENT = {"/models": ["get", "post"], "/models/{model_name}": ["get", "put", "delete"]}

#: Operation → (operationId, parameters with their defaults, statuses), from the reference.
OPERATIONS: dict[tuple[str, str], tuple[str, dict[str, str | None], str]] = {
    ("/", "options"): ("apiDescription", {}, "200 500"),
    ("/{model_name}/predict", "post"): ("predict", {"model_name": None}, "200 404 500 503"),
    ("/ping", "get"): ("ping", {}, "200 500"),
    ("/predictions/{model_name}", "post"): (
        "predictions",
        {"model_name": None},
        "200 404 500 503",
    ),
    ("/predictions/{model_name}", "options"): ("predictionsApi", {"model_name": None}, "200"),
    ("/api-description", "get"): ("apiDescription", {}, "200 500"),
    ("/invocations", "post"): ("invocations", {"model_name": None}, "200 400 404 500 503"),
    ("/models/{model_name}/invoke", "post"): (
        "invocations",
        {"model_name": None},
        "200 400 404 500 503",
    ),
    ("/models", "get"): (
        "listModels",
        {"limit": "100", "next_page_token": None, "model_name_pattern": None},
        "200 500",
    ),
    ("/models", "post"): (
        "registerModel",
        {
            "model_url": None,
            "model_name": None,
            "handler": None,
            "runtime": None,
            "batch_size": "1",
            "max_batch_delay": "100",
            "response_timeout": "2",
            "initial_workers": "0",
            "synchronous": "false",
            "preload_model": "false",
        },
        "200 202 210 400 404 409 500",
    ),
    ("/models/{model_name}", "get"): ("describeModel", {"model_name": None}, "200 500"),
    ("/models/{model_name}", "put"): (
        "setAutoScale",
        {
            "model_name": None,
            "min_worker": "1",
            "max_worker": "1",
            "number_gpu": "0",
            "synchronous": "false",
            "timeout": "-1",
        },
        "200 202 210 400 404 500",
    ),
    ("/models/{model_name}", "delete"): (
        "unregisterModel",
        {"model_name": None, "synchronous": "false", "timeout": "-1"},
        "200 202 404 408 500",
    ),
}


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (inference_description(), ROOT | INFERENCE),
        (management_description(), ROOT | MANAGEMENT),
        (shared_description(), ROOT | INFERENCE | MANAGEMENT),
    ],
    ids=["inference", "management", "shared"],
)
def test_each_listener_describes_its_own_paths_in_order(
    text: bytes, paths: dict[str, list[str]]
) -> None:
    document = json.loads(text)
    assert list(document) == ["openapi", "info", "paths"]
    assert document["openapi"] == "3.0.1"
    assert list(document["info"]) == ["title", "description", "version"]
    assert (document["info"]["title"], document["info"]["version"]) == (
        "Model Server APIs",
        "1.0.0",
    )
    found = [(path, list(methods)) for path, methods in document["paths"].items()]
    assert found == list(paths.items())


def test_every_operation_is_that_of_the_reference() -> None:
    found = {}
    for path, method, operation in operations(json.loads(shared_description())):
        parameters = {p["name"]: p["schema"].get("default") for p in operation["parameters"]}
        statuses = " ".join(operation["responses"])
        found[path, method] = (operation["operationId"], parameters, statuses)
    assert found == OPERATIONS


def test_the_older_spellings_are_deprecated() -> None:
    document = json.loads(shared_description())
    deprecated = {path for path, _, operation in operations(document) if "deprecated" in operation}
    assert deprecated == {"/{model_name}/predict", "/api-description"}


def test_every_error_has_the_error_schema_and_every_reply_a_description() -> None:
    for _, _, operation in operations(json.loads(shared_description())):
        for status, reply in operation["responses"].items():
            assert reply["description"]
            if int(status) >= 400:
                schema = reply["content"]["application/json"]["schema"]
                assert schema["required"] == ["code", "type", "message"]


def test_a_model_describes_its_one_path() -> None:
    document = json.loads(model_description("a=b"))
    assert document["info"] == {"title": "RESTful API for: a=b", "version": "1.0.0"}
    ((path, method, operation),) = operations(document)
    assert (path, method, operation["operationId"]) == ("/prediction/a=b", "post", "a=b")
    assert list(operation["responses"]) == ["200", "500"]
    assert "content" not in operation["responses"]["200"]


def test_descriptions_are_made_once() -> None:
    assert shared_description() is shared_description()
