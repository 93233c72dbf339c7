"""The guard before the management routes, as clients meet it."""

from pathlib import Path
from typing import Any

import pytest

from tests.frontend.fake_models import FakeModels
from tests.frontend.in_process import House

EVIL = {"Origin": "http://evil.example"}
PREFLIGHT = {"Access-Control-Request-Method": "PUT"}


def house(**settings: Any) -> House:
    models = FakeModels()
    models.add("m")
    return House(models, **settings)


MANAGEMENT_CALLS = [
    ("GET", "/models"),
    ("POST", "/models?url=x.mar"),
    ("GET", "/models/m"),
    ("PUT", "/models/m?min_worker=2"),
    ("DELETE", "/models/m"),
]


@pytest.mark.parametrize(("method", "target"), MANAGEMENT_CALLS)
def test_a_foreign_page_may_not_manage(method: str, target: str) -> None:
    served = house()
    for send in (served.manage, served.share):
        for origin in ("http://evil.example", "null", "http://localhost:3000"):
            status, kind, message = send(method, target, b"", {"Origin": origin}).told
            assert (status, kind) == (403, "ForbiddenException")
            assert "cors_allowed_origin" in message
    assert served.models.asked == []


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ("*", "http://evil.example"),
        ("http://ui.example", "http://ui.example"),
        (None, "http://localhost:8081"),
    ],
)
def test_a_page_that_cors_allows_or_of_the_server_itself_may(
    allowed: str | None, origin: str
) -> None:
    served = house(cors_allowed_origin=allowed)
    for send in (served.manage, served.share):
        assert send("GET", "/models", b"", {"Origin": origin}).status == 200


def test_every_origin_that_a_request_names_counts() -> None:
    own, foreign = ("Origin", "http://localhost:8081"), ("origin", "http://evil.example")
    for headers in ([own, foreign], [foreign, own]):
        assert house().manage("GET", "/models", b"", headers).told[0] == 403


def test_the_host_of_an_absolute_target_counts() -> None:
    for send in (house().manage, house().share):
        assert send("GET", "http://evil.example/models").told[0] == 403
        rebound = {"Host": "evil.example"}
        assert send("GET", "http://localhost:8081/models", b"", rebound).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8081",
        "10.0.0.1",
        "127.0.0.1.nip.example",
        "localhost:80@evil.example",
        "[::1]evil.example",
    ],
)
def test_a_rebound_host_name_is_refused_on_loopback(host: str) -> None:
    served = house(cors_allowed_origin="*")
    for send in (served.manage, served.share):
        status, kind, message = send("GET", "/models", b"", {"Host": host}).told
        assert (status, kind) == (403, "ForbiddenException")
        assert "localhost" in message


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8081", "[::1]:8081", ""])
def test_names_of_this_machine_and_clients_without_one_are_let_in(host: str) -> None:
    assert house().manage("GET", "/models", b"", {"Host": host}).status == 200


@pytest.mark.parametrize("address", ["http://0.0.0.0:8081", "unix:/run/m.sock"])
def test_bound_wider_or_to_a_socket_any_host_is_taken(address: str) -> None:
    served = house(management_address=address)
    assert served.manage("GET", "/models", b"", {"Host": "mms.internal"}).status == 200
    assert served.manage("GET", "/models", b"", {"Host": "mms.internal"} | EVIL).told[0] == 403


def test_predictions_are_open_to_every_page_and_host() -> None:
    served = house()
    for headers in (EVIL, {"Host": "evil.example"}):
        for target in ("/predictions/m", "/models/m/invoke", "/m/predict"):
            assert served.share("POST", target, b"x", headers).status == 200
            assert served.infer("POST", target, b"x", headers).status == 200
        assert served.share("GET", "/ping", b"", headers).status == 200
        assert served.share("OPTIONS", "/", b"", headers).status == 200


# Preflights


@pytest.mark.parametrize(
    "target", ["/models", "/models/m", "/predictions/m", "/models/m/invoke", "/nope", "/"]
)
def test_a_preflight_succeeds_on_every_route(target: str) -> None:
    served = house(cors_allowed_origin="*", cors_allowed_methods="GET, PUT")
    for send in (served.infer, served.manage, served.share):
        reply = send("OPTIONS", target, b"", EVIL | PREFLIGHT)
        assert (reply.status, reply.body) == (200, b"")


def test_a_preflight_needs_no_token_but_an_origin_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    served = house(
        cors_allowed_origin="http://ui.example",
        management_token_file=str(tmp_path / "token"),
    )
    for send in (served.manage, served.share):
        ours = {"Origin": "http://ui.example"}
        assert send("OPTIONS", "/models", b"", ours | PREFLIGHT).status == 200
        assert send("OPTIONS", "/models", b"", EVIL | PREFLIGHT).told[0] == 403
        assert send("GET", "/models", b"", ours).told[0] == 401


def test_plain_options_keep_their_meaning() -> None:
    for settings, headers in (({"cors_allowed_origin": "*"}, EVIL), ({}, {})):
        served = house(**settings)
        assert served.share("OPTIONS", "/", b"", headers).json()["openapi"]
        assert served.share("OPTIONS", "/predictions/m", b"", headers).json()["openapi"]
        assert served.share("OPTIONS", "/models", b"", headers).told[0] == 405


def test_without_cors_keys_a_preflight_is_plain_options() -> None:
    served = house()
    assert served.infer("OPTIONS", "/predictions/m", b"", EVIL | PREFLIGHT).json()["openapi"]
    assert served.manage("OPTIONS", "/models", b"", EVIL | PREFLIGHT).told[0] == 403


# Token


@pytest.mark.parametrize(("method", "target"), MANAGEMENT_CALLS)
def test_management_demands_the_token_where_one_is_set(
    method: str, target: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret\n")
    served = house(management_token_file=str(tmp_path / "token"))
    for send in (served.manage, served.share):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            reply = send(method, target, b"", headers)
            assert reply.told[:2] == (401, "UnauthorizedException")
            assert reply.headers["www-authenticate"].startswith("Bearer")
    reply = served.manage(method, target, b"", {"authorization": "bearer secret"})
    assert reply.status in (200, 202)


def test_predictions_need_no_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    served = house(management_token_file=str(tmp_path / "token"))
    assert served.share("POST", "/models/m/invoke", b"x").status == 200
    assert served.share("GET", "/ping").status == 200
    assert served.infer("POST", "/predictions/m", b"x").status == 200
    assert served.manage("OPTIONS", "/").told[0] == 401
