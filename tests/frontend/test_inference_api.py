import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest, PredictionFailed, ServeError, WorkerDied
from mmserve.frontend.http import Response
from mmserve.scheduling.job import Job, Result
from tests.frontend.fake_models import FakeModels
from tests.frontend.in_process import FORM, House, RecordingExchange, Reply, request

PREDICT_ROUTES = [
    "/predictions/m",
    "/predictions/m/further",
    "/m/predict",
    "/models/m/invoke",
    "/invocations?model_name=m",
]


def as_dict(job: Job) -> dict[str, str]:
    """What the handler would see, all of it as text."""
    return {p.name: bytes(value).decode() for p, value in job.parameters}


def shows_its_dict(job: Job) -> Result:
    return Result(200, None, [], json.dumps(as_dict(job)).encode())


def house(*names: str, at_start: bool = False, **settings: Any) -> House:
    models = FakeModels()
    for name in names:
        models.add(name, at_start=at_start).handler = shows_its_dict
    return House(models, **settings)


def answering(outcome: Result | ServeError, **settings: Any) -> House:
    models = FakeModels()
    models.add("m").handler = lambda job: outcome
    return House(models, **settings)


# Routes


@pytest.mark.parametrize("target", PREDICT_ROUTES)
@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE", "HEAD", "PATCH"])
def test_every_spelling_predicts_with_any_method(method: str, target: str) -> None:
    for send in (house("m").infer, house("m").share):
        reply = send(method, target, b"x")
        assert reply.status == 200
        assert json.loads(reply.body)["body"] == "x"


@pytest.mark.parametrize("target", PREDICT_ROUTES)
def test_options_describes_the_model_on_every_spelling(target: str) -> None:
    for send in (house("m").infer, house("m").share):
        reply = send("OPTIONS", target)
        assert (reply.status, reply.json()["info"]["title"]) == (200, "RESTful API for: m")
        told = send("OPTIONS", target.replace("m/", "ghost/").removesuffix("m") + "ghost").told
        assert told[0] == 404


@pytest.mark.parametrize("segment", ["a%20b", "a+b", "a.b-c_d", "caf%C3%A9", "n" * 120, "x%2Fy"])
def test_a_name_works_on_every_spelling(segment: str) -> None:
    name = segment.replace("%20", " ").replace("%C3%A9", "é").replace("%2F", "/")
    served = house(name)
    for target in (f"/predictions/{segment}", f"/{segment}/predict", f"/models/{segment}/invoke"):
        assert served.infer("POST", target, b"x").status == 200, target


@pytest.mark.parametrize("target", PREDICT_ROUTES)
def test_an_unknown_model_is_404(target: str) -> None:
    assert house().infer("POST", target).told == (
        404,
        "ModelNotFoundException",
        "Model not found: m",
    )


@pytest.mark.parametrize(
    "target",
    ["/predictions", "/nope", "/models", "/models/m", "/models/m/x", "/invocations/x", "*"],
)
def test_unknown_routes_are_404(target: str) -> None:
    status, kind, message = house("m").infer("POST", target).told
    assert (status, kind) == (404, "ResourceNotFoundException")
    assert message.startswith("Requested resource is not found")


@pytest.mark.parametrize("target", ["/predictions/%zz", "/m%/predict", "/models/%ff/invoke"])
def test_a_path_that_is_not_percent_encoded_is_400(target: str) -> None:
    assert house("m").infer("POST", target).told[:2] == (400, "BadRequestException")


@pytest.mark.parametrize(("method", "status"), [("OPTIONS", 200), ("GET", 405), ("POST", 405)])
def test_the_root_only_describes_the_api(method: str, status: int) -> None:
    for send in (house().infer, house().manage, house().share):
        reply = send(method, "/")
        assert reply.status == status
        if status == 405:
            assert reply.told[1] == "MethodNotAllowedException"
            assert reply.told[2].startswith("Requested method is not allowed")
            assert "allow" not in reply.headers  # as Multi Model Server


def test_the_api_description_is_that_of_the_listener() -> None:
    everything = house("m")
    for send, paths in ((everything.infer, 7), (everything.manage, 3), (everything.share, 9)):
        description = send("GET", "/api-description")
        assert len(description.json()["paths"]) == paths
        assert send("OPTIONS", "/").body == description.body
        assert send("GET", "/api-description/x").status == 405


# Which parameters the handler sees


def test_query_parameters_reach_the_handler_but_on_predictions() -> None:
    served = house("m")
    for target in ("/invocations?model_name=m&k=v", "/models/m/invoke?k=v", "/m/predict?k=1&k=v"):
        seen = json.loads(served.infer("POST", target, b"x").body)
        assert (seen["k"], seen["body"]) == ("v", "x"), target
    seen = json.loads(served.infer("POST", "/predictions/m?k=v&a=%zz", b"x").body)
    assert seen == {"body": "x"}


def test_the_body_wins_over_the_query() -> None:
    served = house("m")
    for target in ("/models/m/invoke?body=q&a=q", "/invocations?model_name=m&body=q&a=q"):
        assert json.loads(served.infer("POST", target, b"x").body)["body"] == "x"
        assert json.loads(served.infer("POST", target, b"a=1", FORM).body)["a"] == "1"


def test_a_job_carries_the_request_and_its_media_type() -> None:
    models = FakeModels()
    model = models.add("m")
    House(models).infer("POST", "/predictions/m", b"{}", {"content-TYPE": "application/json; x=y"})
    (job,) = model.seen
    assert job.request_id == "the-id"
    assert ("content-TYPE", "application/json; x=y") in job.headers
    ((parameter, value),) = job.parameters
    assert (parameter.name, parameter.content_type) == ("body", "application/json; x=y")
    assert value == b"{}"


def test_the_last_of_several_content_types_counts() -> None:
    models = FakeModels()
    model = models.add("m")
    exchange = RecordingExchange(request("POST", "/predictions/m", b"a=1", {"Content-Type": "a/b"}))
    exchange.request.headers.append(("content-type", FORM["Content-Type"]))
    House(models).api.inference(exchange)
    assert as_dict(model.seen[0]) == {"a": "1"}


@pytest.mark.parametrize("body", [b"=1", b"a=%zz"])
def test_a_form_that_cannot_be_read_is_400_before_the_model_is_looked_up(body: bytes) -> None:
    for target in PREDICT_ROUTES:
        assert house().infer("POST", target, body, FORM).told[:2] == (400, "BadRequestException")


# /invocations


def test_invocations_mean_the_one_model_of_the_start() -> None:
    models = FakeModels()
    models.add("a", at_start=True).handler = lambda job: Result(200, None, [], b"a")
    models.add("later").handler = lambda job: Result(200, None, [], b"later")
    served = House(models)
    for target, body in {
        "/invocations": b"a",
        "/invocations/": b"a",
        "/invocations?model_name=": b"a",
        "/invocations?model_name=&model_name=later": b"a",
        "/invocations?model_name=later": b"later",
        "/invocations?model_name=later&model_name=a": b"later",
    }.items():
        assert served.infer("POST", target, b"x").body == body, target


@pytest.mark.parametrize("names", ["", "ab"])
def test_invocations_without_a_name_are_400_among_none_or_several(names: str) -> None:
    served = house(*names, at_start=True)
    for method in ("POST", "OPTIONS"):
        for target in ("/invocations", "/invocations?model_name="):
            assert served.infer(method, target, b"x").told == (
                400,
                "BadRequestException",
                "Parameter model_name is required.",
            )


def test_a_form_field_may_name_the_model() -> None:
    served = house("a", "b")
    assert served.infer("POST", "/invocations", b"model_name=b&x=1", FORM).status == 200
    assert served.infer("POST", "/invocations", b"model_name=ghost", FORM).told[0] == 404
    assert served.infer("POST", "/invocations", b"model_name=&x=1", FORM).told[0] == 400
    multipart = {"Content-Type": "multipart/form-data; boundary=B"}
    body = b'--B\r\nContent-Disposition: form-data; name="model_name"\r\n\r\nb\r\n--B--\r\n'
    assert served.infer("POST", "/invocations", body, multipart).status == 200


def test_a_form_field_that_names_no_model_still_goes_to_the_one_of_the_start() -> None:
    models = FakeModels()
    models.add("a", at_start=True).handler = lambda job: Result(200, None, [], b"a")
    models.add("b").handler = lambda job: Result(200, None, [], b"b")
    served = House(models)
    assert served.infer("POST", "/invocations", b"model_name=mine", FORM).body == b"a"
    assert served.infer("POST", "/invocations", b"model_name=b", FORM).body == b"b"
    assert served.infer("POST", "/invocations?model_name=a", b"model_name=b", FORM).body == b"a"


# Replies


def test_status_phrase_headers_and_body_are_the_handlers() -> None:
    reply = answering(Result(207, "Fine", [("X-A", "b")], b"body")).infer("POST", "/predictions/m")
    assert (reply.status, reply.reason, reply.body) == (207, "Fine", b"body")
    assert reply.headers == {"x-a": "b"}


def test_an_empty_phrase_is_the_standard_one() -> None:
    assert answering(Result(200, "", [], b"")).infer("POST", "/predictions/m").reason is None


def test_only_json_gets_a_content_type_and_only_where_the_handler_set_none() -> None:
    def content_type(headers: list[tuple[str, str]], is_json: bool) -> str | None:
        result = Result(200, None, headers, b"{}", is_json)
        return answering(result).infer("POST", "/predictions/m").headers.get("content-type")

    assert content_type([], True) == "application/json"
    assert content_type([("Content-type", "text/x")], True) == "text/x"
    assert content_type([("X-A", "b")], False) is None


@pytest.mark.parametrize("status", [0, 99, 100, 199, 1000, -5])
def test_a_status_that_cannot_be_sent_is_503(status: int) -> None:
    reply = answering(Result(status, None, [], b"")).infer("POST", "/predictions/m")
    assert reply.told[:2] == (503, "InternalServerException")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (WorkerDied(), (500, "InternalServerException", "Worker died.")),
        (
            PredictionFailed(507, "Out of resources"),
            (507, "InternalServerException", "Out of resources"),
        ),
        (PredictionFailed(599, "mine"), (599, "InternalServerException", "mine")),
        (BadRequest("Malformed JSON"), (400, "BadRequestException", "Malformed JSON")),
    ],
)
def test_a_failure_is_told(error: ServeError, told: tuple[int, str, str]) -> None:
    assert answering(error).infer("POST", "/predictions/m").told == told


def test_no_worker_and_a_full_queue_are_503_with_retry_after() -> None:
    models = FakeModels()
    models.add("idle", workers=0)
    busy = models.add("busy")
    busy.is_paused, busy.capacity = True, 0
    for name in ("idle", "busy"):
        reply = House(models).infer("POST", f"/predictions/{name}")
        status, kind, message = reply.told
        assert (status, kind) == (503, "ServiceUnavailableException")
        assert message.startswith(f"No worker is available to serve request for model: {name}")
        assert reply.headers["retry-after"] == "1"
    assert "queue is full" in message


def test_a_bug_of_ours_is_500_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    models = FakeModels()

    def fails(job: Job) -> Result:
        raise KeyError("inner secret")

    models.add("m").handler = fails
    reply = House(models).infer("POST", "/predictions/m")
    assert reply.told[:2] == (500, "InternalServerException")
    assert b"secret" not in reply.body
    assert "request failed" in caplog.text


# Waiting


def waiting_house() -> tuple[FakeModels, RecordingExchange]:
    models = FakeModels()
    models.add("m").is_paused = True
    exchange = RecordingExchange(request("POST", "/predictions/m", b"x"))
    House(models).api.inference(exchange)
    assert exchange.response is None
    return models, exchange


def test_a_reply_may_come_later() -> None:
    models, exchange = waiting_house()
    models.models["m"].go_on()
    assert exchange.response is not None
    assert exchange.on_gone is None


def test_a_client_that_leaves_cancels_its_job() -> None:
    models, exchange = waiting_house()
    assert exchange.on_gone is not None
    exchange.on_gone()
    assert models.models["m"].waiting[0].is_cancelled
    models.models["m"].go_on()
    assert models.models["m"].seen == []
    assert exchange.on_gone is None


# Server-Timing


def test_server_timing_is_told_where_it_is_asked_for() -> None:
    result = Result(200, None, [("X-A", "b")], b"ok")
    assert "server-timing" not in answering(result).infer("POST", "/predictions/m").headers
    timed = answering(result, server_timing=True).infer("POST", "/predictions/m").headers
    assert timed["server-timing"].startswith("total;dur=")
    assert timed["x-a"] == "b"

    result.queue_s, result.handler_s = 0.0015, 0.25
    timed = answering(result, server_timing=True).infer("POST", "/predictions/m").headers
    assert timed["server-timing"].startswith("queue;dur=1.500, handler;dur=250.000, total;dur=")


def test_server_timing_is_told_of_failures_too() -> None:
    reply = answering(WorkerDied(), server_timing=True).infer("POST", "/predictions/m")
    assert reply.told[0] == 500
    assert reply.headers["server-timing"].startswith("total;dur=")


# Ping


@pytest.mark.parametrize("health", ["Healthy", "Partial Healthy", "Unhealthy"])
@pytest.mark.parametrize("mode", ["mms", "live", "ready"])
def test_ping_tells_the_health_and_only_ready_is_strict(health: str, mode: str) -> None:
    models = FakeModels()
    models.unhealthy = health
    served = House(models, ping_mode=mode)
    status = 503 if mode == "ready" and health == "Unhealthy" else 200
    for target in ("/ping", "/ping/", "/ping/x"):
        for method in ("GET", "POST", "OPTIONS"):
            reply = served.infer(method, target)
            assert (reply.status, reply.json()) == (status, {"status": health})
    assert served.share("GET", "/ping").body == f'{{\n  "status": "{health}"\n}}\n'.encode()
    assert served.manage("GET", "/ping").told[0] == 404


@pytest.mark.parametrize("health", ["Healthy", "Partial Healthy"])
def test_a_strict_ping_waits_for_each_model_of_the_start(health: str) -> None:
    models = FakeModels()
    models.unhealthy = health
    served = House(models, ping_mode="ready")
    models.add("later").is_loading = True
    models.add("parked", workers=0, at_start=True)
    first, second = models.add("a", at_start=True), models.add("b", at_start=True)
    for is_loading, status in (((True, True), 503), ((False, True), 503), ((False, False), 200)):
        first.is_loading, second.is_loading = is_loading
        reply = served.infer("GET", "/ping")
        assert reply.status == status
        assert (reply.json()["status"] == "Healthy") is (status == 200 and health == "Healthy")


def test_a_strict_ping_misses_models_of_the_start_that_are_not_there() -> None:
    models = FakeModels()
    strict, lenient = House(models, ping_mode="ready"), House(models, ping_mode="live")
    models.missing.append("gone")
    assert strict.infer("GET", "/ping").status == 503
    assert strict.infer("GET", "/ping").json() == {"status": "Unhealthy"}
    assert lenient.infer("GET", "/ping").status == 200
    models.missing.clear()
    assert strict.infer("GET", "/ping").status == 200


# Anything


@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "X"]),
    st.lists(
        st.sampled_from(
            [
                "/",
                "models",
                "predictions",
                "m",
                "invoke",
                "predict",
                "?",
                "&",
                "=",
                "%2F",
                "%",
                "ping",
            ]
        )
    ).map("".join)
    | st.text(st.characters(codec="latin-1")),
    st.binary(max_size=50),
    st.sampled_from(
        ["", FORM["Content-Type"], "multipart/form-data; boundary=B", "application/json"]
    ),
)
def test_any_request_gets_one_reply_and_never_a_500(
    method: str, target: str, body: bytes, content_type: str
) -> None:
    served = house("m", at_start=True)
    for send in (served.infer, served.manage, served.share):
        reply: Reply = send(method, "/" + target, body, {"Content-Type": content_type})
        assert reply.status < 500
        if reply.status >= 400:
            assert reply.told[0] == reply.status


def test_replies_are_of_the_edges_kind() -> None:
    exchange = RecordingExchange(request("GET", "/ping"))
    house().api.inference(exchange)
    assert isinstance(exchange.response, Response)
