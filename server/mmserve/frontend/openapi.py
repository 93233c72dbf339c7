"""The API descriptions that `OPTIONS /` and its kin answer with. Quiet.

Paths, operations, parameters, schemas and their order are those of Multi Model Server, also where
it describes what it does not do; clients have been generated from them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

from mmserve.frontend.pretty import pretty

Node: TypeAlias = dict[str, Any]


@cache
def inference_description() -> bytes:
    """Of the inference listener, as JSON."""
    return _document({**_root(), **_inference()})


@cache
def management_description() -> bytes:
    """Of the management listener, as JSON."""
    return _document({**_root(), **_management()})


@cache
def shared_description() -> bytes:
    """Of a listener that has both, as JSON."""
    return _document({**_root(), **_inference(), **_management()})


def model_description(name: str) -> bytes:
    """Of one model, as JSON."""
    operation = {
        "description": "Predicts with this model.",
        "operationId": name,
        "parameters": [],
        "responses": {"200": {"description": "What the model answers."}, **_errors("500")},
    }
    # `prediction`, without an s, is Multi Model Server's.
    return pretty(
        {
            "openapi": "3.0.1",
            "info": {"title": f"RESTful API for: {name}", "version": "1.0.0"},
            "paths": {f"/prediction/{name}": {"post": operation}},
        }
    )


def _document(paths: Node) -> bytes:
    return pretty(
        {
            "openapi": "3.0.1",
            "info": {
                "title": "Model Server APIs",
                "description": "Serves many models over one REST API.",
                "version": "1.0.0",
            },
            "paths": paths,
        }
    )


# Paths


def _root() -> Node:
    return {"/": {"options": _operation("apiDescription", None, [], _described() | _errors("500"))}}


def _inference() -> Node:
    model_path = [_in_path("model_name", "Name of the model.")]
    predicted = _binary_reply() | _errors("404", "500", "503")
    form = _form()
    invocation = _operation(
        "invocations",
        "Predicts with the named model, or the only one loaded at start.",
        [_in_query("model_name", "Name of the model.")],
        {"200": _content("*/*", form, "What the model answers.")}
        | _errors("400", "404", "500", "503"),
        body=_body("multipart/form-data", form, None),
    )
    return {
        "/{model_name}/predict": {
            "post": _operation(
                "predict",
                "Predicts; an older spelling of /predictions.",
                model_path,
                predicted,
                body=_body("*/*", _BINARY),
                deprecated=True,
            )
        },
        "/ping": {"get": _operation("ping", None, [], _statuses("200", "500"))},
        "/predictions/{model_name}": {
            "post": _operation(
                "predictions",
                "Predicts with one model.",
                model_path,
                predicted,
                body=_body("*/*", _BINARY),
            ),
            "options": _operation(
                "predictionsApi",
                "Describes the API of one model.",
                model_path,
                {"200": _content("application/json", {"type": "object"}, "The description.")},
            ),
        },
        "/api-description": {
            "get": _operation(
                "apiDescription",
                None,
                [],
                _described() | _errors("500"),
                deprecated=True,
            )
        },
        "/invocations": {"post": invocation},
        "/models/{model_name}/invoke": {"post": invocation},
    }


def _management() -> Node:
    name = _in_path("model_name", "Name of the model.")
    waits = _in_query("synchronous", "Whether to wait for the workers.", "boolean", "false")
    timeout = _in_query("timeout", "Seconds to wait for workers that stop.", "integer", "-1")
    return {
        "/models": {
            "get": _operation(
                "listModels",
                "Lists the registered models.",
                [
                    _in_query("limit", "Models on a page.", "integer", "100"),
                    _in_query("next_page_token", "Token that the page before gave."),
                    _in_query("model_name_pattern", "Not used."),
                ],
                {"200": _content("application/json", _MODEL_LIST, "One page.")} | _errors("500"),
            ),
            "post": _operation(
                "registerModel",
                "Registers a model.",
                _registration_parameters(waits),
                _statuses("200", "202", "210", "400", "404", "409", "500"),
            ),
        },
        "/models/{model_name}": {
            "get": _operation(
                "describeModel",
                "Describes one model and its workers.",
                [name],
                {"200": _content("application/json", _MODEL, "The model.")} | _errors("500"),
            ),
            "put": _operation(
                "setAutoScale",
                "Changes the number of workers of a model.",
                [
                    name,
                    _in_query("min_worker", "Fewest workers.", "integer", "1"),
                    _in_query("max_worker", "Most workers.", "integer", "1"),
                    _in_query("number_gpu", "Not used.", "integer", "0"),
                    waits,
                    timeout,
                ],
                _statuses("200", "202", "210", "400", "404", "500"),
            ),
            "delete": _operation(
                "unregisterModel",
                "Unregisters a model and ends its workers.",
                [name, waits, timeout],
                _statuses("200", "202", "404", "408", "500"),
            ),
        },
    }


def _registration_parameters(waits: Node) -> list[Node]:
    runtime = _in_query("runtime", "Interpreter of the handler.")
    runtime["schema"]["enum"] = ["PYTHON", "PYTHON2", "PYTHON3"]
    return [
        _in_query("model_url", "Archive, directory or URL; `url` says the same.", required=True),
        _in_query("model_name", "Name; the archive's own where it is missing."),
        _in_query("handler", "Handler; the archive's own where it is missing."),
        runtime,
        _in_query("batch_size", "Requests in a batch at most.", "integer", "1"),
        _in_query("max_batch_delay", "Milliseconds a batch waits to fill.", "integer", "100"),
        _in_query("response_timeout", "Minutes a worker may take.", "integer", "2"),
        _in_query("initial_workers", "Workers to start.", "integer", "0"),
        waits,
        _in_query("preload_model", "Whether workers share one loaded model.", "boolean", "false"),
    ]


# Operations and their parts


def _operation(
    identifier: str,
    description: str | None,
    parameters: list[Node],
    responses: Node,
    *,
    body: Node | None = None,
    deprecated: bool = False,
) -> Node:
    operation: Node = {} if description is None else {"description": description}
    operation |= {"operationId": identifier, "parameters": parameters}
    if body is not None:
        operation["requestBody"] = body
    operation["responses"] = responses
    if deprecated:
        operation["deprecated"] = True
    return operation


def _in_path(name: str, description: str) -> Node:
    return _parameter("path", name, description, True, {"type": "string"})


def _in_query(
    name: str,
    description: str,
    kind: str = "string",
    default: str | None = None,
    *,
    required: bool = False,
) -> Node:
    # Defaults are texts there, whatever the type.
    schema = {"type": kind} | ({} if default is None else {"default": default})
    return _parameter("query", name, description, required, schema)


def _parameter(where: str, name: str, description: str, required: bool, schema: Node) -> Node:
    return {
        "in": where,
        "name": name,
        "description": description,
        "required": required,
        "schema": schema,
    }


def _body(
    media_type: str, schema: Node, description: str | None = "What the handler gets."
) -> Node:
    body: Node = {} if description is None else {"description": description}
    return body | {"content": {media_type: {"schema": schema}}, "required": True}


def _content(media_type: str, schema: Node, description: str) -> Node:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _statuses(*codes: str) -> Node:
    """Replies of management: a status below 400, an error from there on."""
    status = _object({"status": _text("What was done.")}, required=["status"])
    return {
        code: (
            _errors(code)[code]
            if code >= "400"
            else _content("application/json", status, _REPLIES[code])
        )
        for code in codes
    }


def _errors(*codes: str) -> Node:
    error = _object(
        {
            "code": _number("HTTP status."),
            "type": _text("Kind of error."),
            "message": _text("What went wrong."),
        },
        required=["code", "type", "message"],
    )
    return {code: _content("application/json", error, _REPLIES[code]) for code in codes}


def _described() -> Node:
    schema = _object(
        {"openapi": {"type": "string"}, "info": {"type": "object"}, "paths": {"type": "object"}},
        required=["openapi", "info", "paths"],
    )
    return {"200": _content("application/json", schema, "The description.")}


def _binary_reply() -> Node:
    return {"200": _content("*/*", _BINARY, "What the model answers.")}


def _form() -> Node:
    return {
        "required": ["data"],
        "properties": {
            "model_name": _text("Name of the model."),
            "data": {**_BINARY, "description": "What the handler gets."},
        },
    }


def _object(properties: Node, required: list[str]) -> Node:
    return {"type": "object", "required": required, "properties": properties}


def _text(description: str) -> Node:
    return {"type": "string", "description": description}


def _number(description: str) -> Node:
    return {"type": "integer", "description": description}


_BINARY = {"type": "string", "format": "binary"}

_REPLIES = {
    "200": "Done.",
    "202": "Begun; the workers come and go in the background.",
    "210": "Some of the workers are ready.",
    "400": "The request is wrong.",
    "404": "There is no such model.",
    "408": "The workers did not end in time.",
    "409": "The name is taken.",
    "500": "The server or the model failed.",
    "503": "No worker can take the request now.",
}

_MODEL_LIST = _object(
    {
        "nextPageToken": _text("Token of the next page; missing on the last."),
        "models": {
            "type": "array",
            "items": _object(
                {
                    "modelName": _text("Name of the model."),
                    "modelUrl": _text("Where it came from."),
                },
                required=["modelName", "modelUrl"],
            ),
            "description": "The models of this page.",
        },
    },
    required=["models"],
)

_WORKER = _object(
    {
        "id": _text("Name of the worker."),
        "startTime": _text("When it was started."),
        "gpu": {"type": "boolean", "description": "Whether it has a GPU."},
        "status": {
            "type": "string",
            "description": "How it is.",
            "enum": ["READY", "LOADING", "UNLOADING"],
        },
    },
    required=["id", "startTime", "status"],
)

_METRICS = _object(
    {
        "rejectedRequests": _number("Requests that were refused."),
        "waitingQueueSize": _number("Requests that wait."),
        "requests": _number("Requests so far."),
    },
    required=["rejectedRequests", "waitingQueueSize", "requests"],
)

_MODEL = _object(
    {
        "modelName": _text("Name of the model."),
        "modelVersion": _text("Version of the model."),
        "modelUrl": _text("Where it came from."),
        "minWorkers": _number("Fewest workers."),
        "maxWorkers": _number("Most workers."),
        "batchSize": _number("Requests in a batch at most."),
        "maxBatchDelay": _number("Milliseconds a batch waits to fill."),
        "status": _text("How the model is."),
        "workers": {"type": "array", "items": _WORKER, "description": "Its workers."},
        "metrics": _METRICS,
    },
    required=[
        "modelName",
        "modelVersion",
        "modelUrl",
        "minWorkers",
        "maxWorkers",
        "status",
        "workers",
        "metrics",
    ],
)
