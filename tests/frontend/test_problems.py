import inspect
import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve import errors
from mmserve.errors import ServeError
from mmserve.frontend.problems import STATUS, problem, status_of


def subclasses(of: type[ServeError]) -> Iterator[type[ServeError]]:
    for kind in of.__subclasses__():
        yield kind
        yield from subclasses(kind)


OURS = [kind for kind in subclasses(ServeError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[ServeError]) -> None:
    assert kind in STATUS


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_can_be_told_in_the_shape_clients_know(kind: type[ServeError]) -> None:
    samples = {str: "m", int: 503, float: 1.5}
    wanted = [
        samples[p.annotation]
        for p in inspect.signature(kind.__init__).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]
    reply = problem(kind(*wanted))

    told = json.loads(bytes(reply.body))
    assert told["code"] == reply.status
    assert told["type"].endswith("Exception")
    assert ("content-type", "application/json") in reply.headers
    assert bytes(reply.body).endswith(b"}\n")


def test_the_body_is_printed_as_multi_model_server_prints_it() -> None:
    reply = problem(errors.ModelNotFound("a<b>&c='d'é"))
    assert bytes(reply.body).decode() == (
        "{\n"
        '  "code": 404,\n'
        '  "type": "ModelNotFoundException",\n'
        '  "message": "Model not found: a\\u003cb\\u003e\\u0026c\\u003d\\u0027d\\u0027é"\n'
        "}\n"
    )


def test_an_error_without_a_message_has_no_message_field() -> None:
    assert json.loads(bytes(problem(ServeError()).body)).keys() == {"code", "type"}


def test_the_503_family_says_when_to_come_back() -> None:
    for error in (errors.NoWorker("m"), errors.QueueFull("m", 5), errors.ShuttingDown()):
        reply = problem(error)
        assert reply.status == 503
        assert dict(reply.headers)["retry-after"] == "1"
    for error in (errors.NoWorker("m"), errors.QueueFull("m", 5)):
        message = json.loads(bytes(problem(error).body))["message"]
        assert message.startswith("No worker is available to serve request for model: m")


@pytest.mark.parametrize("kind", [errors.WorkersFailed, errors.WorkerDied])
def test_out_of_memory_is_507(
    kind: type[errors.WorkersFailed] | type[errors.WorkerDied],
) -> None:
    assert status_of(kind("x", out_of_memory=True)) == 507
    assert status_of(kind("x")) == 500


@pytest.mark.parametrize(("asked", "sent"), [(599, 599), (404, 404), (7, 503), (100, 503)])
def test_a_failed_prediction_has_the_status_of_its_handler(asked: int, sent: int) -> None:
    assert problem(errors.PredictionFailed(asked, "x")).status == sent


def test_of_an_error_that_is_not_ours_nothing_leaks() -> None:
    reply = problem(KeyError("secret path"))
    assert reply.status == 500
    assert b"secret" not in reply.body


def test_a_challenge_comes_with_401() -> None:
    assert dict(problem(errors.Unauthorized("no token")).headers)["www-authenticate"].startswith(
        "Bearer"
    )


@given(st.text(st.characters()))
def test_any_message_makes_valid_utf_8_json_that_may_stand_in_html(message: str) -> None:
    body = bytes(problem(errors.BadRequest(message)).body)
    expected = message.encode("utf-8", "replace").decode()
    assert json.loads(body).get("message", "") == expected
    assert not set(b"<>&='") & set(body)


def test_the_empty_message_of_a_handler_is_told() -> None:
    assert b'"message": ""' in problem(errors.PredictionFailed(500, "")).body
