from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import BadRequest
from mmserve.frontend.routes import Route, decoded, route_of, segments

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
RESERVED = {"ping", "predictions", "invocations", "models", "api-description"}


@given(NAMES)
def test_any_name_can_be_addressed_on_every_route(name: str) -> None:
    one = quote(name, safe="")
    assert route_of(f"/predictions/{one}") == (Route.PREDICT, name)
    assert route_of(f"/models/{one}") == (Route.MODEL, name)
    assert route_of(f"/models/{one}/invoke") == (Route.PREDICT_WITH_QUERY, name)
    if name not in RESERVED:
        assert route_of(f"/{one}/predict") == (Route.PREDICT_WITH_QUERY, name)


@given(st.lists(NAMES), st.integers(0, 3))
def test_parts_are_split_before_they_are_decoded(names: list[str], slashes: int) -> None:
    path = "/" + "/".join(quote(name, safe="") for name in names) + "/" * slashes
    assert segments(path) == names


@given(st.text(st.characters(codec="ascii")))
def test_any_path_has_a_route_or_is_the_clients_mistake(path: str) -> None:
    try:
        route, name = route_of(path)
    except BadRequest:
        return
    assert isinstance(route, Route)
    assert isinstance(name, str)


@pytest.mark.parametrize(
    ("path", "route", "name"),
    [
        ("/", Route.ROOT, ""),
        ("//", Route.NO_METHOD, ""),
        ("*", Route.UNKNOWN, ""),
        ("", Route.UNKNOWN, ""),
        ("/ping", Route.PING, ""),
        ("/ping/", Route.PING, ""),
        ("/ping/x/y", Route.PING, ""),
        ("/PING", Route.UNKNOWN, ""),
        ("/pingx", Route.UNKNOWN, ""),
        ("/api-description/", Route.DESCRIPTION, ""),
        ("/api-description/x", Route.NO_METHOD, ""),
        ("/predictions", Route.UNKNOWN, ""),
        ("/predictions/", Route.UNKNOWN, ""),
        ("/predictions/m/further/parts", Route.PREDICT, "m"),
        ("/predictions//m", Route.PREDICT, ""),
        ("//predictions/m", Route.UNKNOWN, ""),
        ("/invocations/", Route.INVOCATIONS, ""),
        ("/invocations/x", Route.UNKNOWN, ""),
        ("/models/", Route.MODELS, ""),
        ("/models/m/", Route.MODEL, "m"),
        ("/models/m/invoke/", Route.PREDICT_WITH_QUERY, "m"),
        ("/models/m/invoke/x", Route.UNKNOWN, ""),
        ("/models/m/other", Route.UNKNOWN, ""),
        ("/models/invoke", Route.MODEL, "invoke"),
        ("/m/predict/", Route.PREDICT_WITH_QUERY, "m"),
        ("/m/predict/x", Route.UNKNOWN, ""),
        ("/predict/predict", Route.PREDICT_WITH_QUERY, "predict"),
        ("/models/a+b", Route.MODEL, "a+b"),
    ],
)
def test_the_first_part_decides(path: str, route: Route, name: str) -> None:
    assert route_of(path) == (route, name)


@pytest.mark.parametrize(
    ("path", "route", "name"),
    [
        ("/models/predict", Route.MODEL, "predict"),
        ("/predictions/predict", Route.PREDICT, "predict"),
        ("/ping/predict", Route.PING, ""),
        ("/invocations/predict", Route.UNKNOWN, ""),
        ("/api-description/predict", Route.NO_METHOD, ""),
    ],
)
def test_the_legacy_spelling_yields_to_every_other(path: str, route: Route, name: str) -> None:
    assert route_of(path) == (route, name)


@pytest.mark.parametrize("part", ["%", "%2", "%zz", "a%e", "%ff", "%c3"])
def test_what_is_not_percent_encoded_utf_8_is_the_clients_mistake(part: str) -> None:
    with pytest.raises(BadRequest):
        decoded(part)
