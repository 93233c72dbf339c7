import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from mmserve.config.settings import Settings
from mmserve.frontend.api import Api
from mmserve.models.port import Progress, Registration
from tests.frontend.fake_models import FakeModels
from tests.frontend.in_process import JSON, House, RecordingExchange, Reply, request


def house(*names: str, **settings: Any) -> House:
    models = FakeModels()
    for name in names:
        models.add(name)
    return House(models, **settings)


def both(served: House) -> list[Any]:
    return [served.manage, served.share]


# Register


def test_a_model_is_registered_by_query_or_by_json() -> None:
    for target, body, headers in (
        ("/models?url=m.mar&initial_workers=2", b"", {}),
        ("/models/?initial_workers=2&url=m.mar", b'{"url": "no.mar"}', {}),
        ("/models?url=no.mar", b"{'url':'m.mar','initial_workers':'2'}", JSON),
        ("/models", b"{url:m.mar,initial_workers:2}", {"content-type": "Application/JSON; x=y"}),
    ):
        for index in range(2):
            served = house()
            reply = both(served)[index]("POST", target, body, headers)
            assert (reply.status, reply.json()) == (200, {"status": "Workers scaled"})
            assert served.models.asked == [Registration(url="m.mar", initial_workers=2)]


@pytest.mark.parametrize(
    ("target", "status", "reason", "text"),
    [
        ("url=m.mar", 200, None, 'Model "m" registered'),
        ("url=m.mar&initial_workers=1", 200, None, "Workers scaled"),
        (
            "url=m.mar&initial_workers=1&synchronous=false",
            202,
            None,
            "Processing worker updates...",
        ),
        (
            "url=slow.mar&initial_workers=1",
            210,
            "Partial Success",
            "Workers scaling in progress...",
        ),
    ],
)
def test_registering_answers_how_far_it_is(
    target: str, status: int, reason: str | None, text: str
) -> None:
    reply = house().manage("POST", f"/models?{target}")
    assert (reply.status, reply.reason, reply.json()) == (status, reason, {"status": text})


def test_the_answer_is_printed_as_multi_model_server_prints_it() -> None:
    reply = house().manage("POST", "/models?url=m.mar&model_name=a%3Db")
    assert reply.body == b'{\n  "status": "Model \\"a\\u003db\\" registered"\n}\n'


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("", (400, "BadRequestException", "Parameter url is required.")),
        ("url=m.mar&runtime=java", (400, "BadRequestException", "Invalid RuntimeType value: java")),
        (
            "url=absent.mar",
            (404, "ModelNotFoundException", "Model not found in model store: absent.mar"),
        ),
        ("url=taken.mar", (409, "ConflictStatusException", "Model taken is already registered.")),
        (
            "url=broken.mar&initial_workers=1",
            (500, "InternalServerException", "Failed to start workers"),
        ),
    ],
)
def test_a_registration_that_fails_says_why(target: str, told: tuple[int, str, str]) -> None:
    served = house("taken")
    for send in both(served):
        assert send("POST", f"/models?{target}").told == told
    assert list(served.models.models) == ["taken"]


@pytest.mark.parametrize("body", [b"{bad", b"[]", b'"x"', b"", b"\xff"])
def test_malformed_json_is_400(body: bytes) -> None:
    told = house().manage("POST", "/models", body, JSON).told
    assert told[:2] == (400, "BadRequestException")


def test_a_bug_of_ours_is_500_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(FakeModels):
        async def register(self, asked: Registration) -> tuple[str, Progress]:
            raise KeyError("inner secret")

    reply = House(Buggy()).manage("POST", "/models?url=m")
    assert reply.told[:2] == (500, "InternalServerException")
    assert b"secret" not in reply.body
    assert "management request failed" in caplog.text


# List and describe


def test_a_list_is_paged_and_its_token_comes_first() -> None:
    served = house("b", "a", "c")
    first = served.manage("GET", "/models?limit=2")
    assert first.body == (
        b'{\n  "nextPageToken": "2",\n  "models": [\n'
        b'    {\n      "modelName": "a",\n      "modelUrl": "a.mar"\n    },\n'
        b'    {\n      "modelName": "b",\n      "modelUrl": "b.mar"\n    }\n  ]\n}\n'
    )
    last = served.share("GET", "/models?limit=2&next_page_token=2").json()
    assert last == {"models": [{"modelName": "c", "modelUrl": "c.mar"}]}
    assert served.manage("GET", "/models?limit=0").json() == {"models": []}
    assert served.manage("GET", "/models?next_page_token=12").json() == {"models": []}


def test_a_list_of_nothing_is_printed_as_multi_model_server_prints_it() -> None:
    assert house().manage("GET", "/models").body == b'{\n  "models": []\n}\n'


def test_a_description_has_the_fields_of_the_reference_in_order() -> None:
    for send in both(house("m")):
        model = send("GET", "/models/m").json()
        assert list(model) == [
            "modelName", "modelUrl", "runtime", "minWorkers", "maxWorkers", "batchSize",
            "maxBatchDelay", "loadedAtStartup", "workers",
        ]  # fmt: skip
        (worker,) = model["workers"]
        assert list(worker) == ["id", "startTime", "status", "gpu", "memoryUsage"]


# Scale and unregister


@pytest.mark.parametrize(
    ("name", "query", "status", "text"),
    [
        ("m", "min_worker=2", 202, "Processing worker updates..."),
        ("m", "min_worker=2&synchronous=true", 200, "Workers scaled"),
        ("m", "min_worker=0&synchronous=true", 200, "Workers scaled"),
        ("slow", "min_worker=2&synchronous=true", 210, "Workers scaling in progress..."),
    ],
)
def test_scaling_answers_how_far_it_is(name: str, query: str, status: int, text: str) -> None:
    for send in both(house("m", "slow")):
        reply = send("PUT", f"/models/{name}?{query}")
        assert (reply.status, reply.json()) == (status, {"status": text})


def test_scaling_reads_the_query_alone() -> None:
    served = house("m")
    served.manage("PUT", "/models/m?min_worker=1&max_worker=4", b'{"min_worker": 9}', JSON)
    assert (served.models.models["m"].least, served.models.models["m"].most) == (1, 4)


@pytest.mark.parametrize("query", ["min_worker=10&max_worker=9", "min_worker=-1"])
def test_numbers_that_make_no_sense_are_400_ahead_of_an_unknown_name(query: str) -> None:
    served = house("m")
    for name in ("m", "ghost"):
        assert served.manage("PUT", f"/models/{name}?{query}").told[0] == 400
    assert served.models.models["m"].least == 1


def test_a_model_is_unregistered() -> None:
    served = house("m", "a/b")
    assert served.manage("DELETE", "/models/m").json() == {"status": 'Model "m" unregistered'}
    assert served.share("DELETE", "/models/a%2Fb").json() == {"status": 'Model "a/b" unregistered'}
    assert served.models.models == {}


def test_a_model_that_cannot_be_cleaned_up_is_408() -> None:
    told = house("stuck").manage("DELETE", "/models/stuck").told
    assert told == (408, "RequestTimeoutException", "Timed out while cleaning resources: stuck")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_an_unknown_model_is_404(method: str) -> None:
    for send in both(house()):
        told = send(method, "/models/ghost").told
        assert told == (404, "ModelNotFoundException", "Model not found: ghost")


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("PUT", "/models"),
        ("DELETE", "/models"),
        ("OPTIONS", "/models"),
        ("HEAD", "/models"),
        ("POST", "/models/m"),
        ("OPTIONS", "/models/m"),
        ("PATCH", "/models/ghost"),
    ],
)
def test_other_methods_are_405(method: str, target: str) -> None:
    for send in both(house("m")):
        reply = send(method, target)
        assert reply.told[:2] == (405, "MethodNotAllowedException")
        assert "allow" not in reply.headers  # as Multi Model Server


# Routes of one listener and of the other


@pytest.mark.parametrize(
    "target", ["/predictions/m", "/ping", "/invocations", "/m/predict", "/nope"]
)
def test_what_is_no_management_is_404_on_its_listener(target: str) -> None:
    assert house("m").manage("POST", target).told[:2] == (404, "ResourceNotFoundException")


def test_a_model_called_predict_can_be_managed_on_a_shared_listener() -> None:
    served = house("predict", "models")
    assert served.share("GET", "/models/predict").json()["modelName"] == "predict"
    assert served.share("PUT", "/models/predict?min_worker=2").status == 202
    assert served.share("POST", "/predict/predict").status == 200
    assert served.share("POST", "/models/models/invoke").status == 200
    assert served.share("DELETE", "/models/predict").status == 200
    assert served.infer("GET", "/models/predict").told[0] == 404


def test_a_model_lives_its_whole_life_on_one_port() -> None:
    served = House(FakeModels(default_workers=1))
    load = json.dumps({"model_name": "aa11", "url": "/opt/mm/aa11"}).encode()
    assert served.share("GET", "/models").json() == {"models": []}
    assert served.share("POST", "/models", load, JSON).status == 200
    assert served.share("POST", "/models", load, JSON).told[0] == 409
    assert served.share("GET", "/models/aa11").json()["modelUrl"] == "/opt/mm/aa11"
    assert served.share("POST", "/models/aa11/invoke", b"x").body == b"ok"
    assert served.share("DELETE", "/models/aa11").status == 200
    assert served.share("POST", "/models/aa11/invoke", b"x").told[0] == 404


# The end of the server


class NeverReady(FakeModels):
    def __init__(self) -> None:
        super().__init__()
        self.has_begun = asyncio.Event()

    async def register(self, asked: Registration) -> tuple[str, Progress]:
        self.has_begun.set()
        await asyncio.Event().wait()
        raise AssertionError


def test_a_request_that_the_end_interrupts_is_told() -> None:
    async def run() -> Reply:
        models = NeverReady()
        exchange = RecordingExchange(request("POST", "/models?url=m"))
        async with asyncio.TaskGroup() as tasks:
            started: list[asyncio.Task[None]] = []

            def spawn(coroutine: Coroutine[Any, Any, None]) -> None:
                started.append(tasks.create_task(coroutine))

            Api(Settings(), models, spawn).management(exchange)
            await models.has_begun.wait()
            started[0].cancel()
        assert exchange.response is not None
        return Reply(exchange.response)

    status, kind, _ = asyncio.run(run()).told
    assert (status, kind) == (503, "ServiceUnavailableException")


def test_after_the_end_nothing_is_started() -> None:
    async def run() -> Reply:
        exchange = RecordingExchange(request("DELETE", "/models/m"))
        async with asyncio.TaskGroup() as tasks:
            pass
        Api(Settings(), FakeModels(), tasks.create_task).management(exchange)
        assert exchange.response is not None
        return Reply(exchange.response)

    assert asyncio.run(run()).told[0] == 503
