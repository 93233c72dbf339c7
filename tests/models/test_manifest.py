from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import InvalidModel
from mmserve.models.manifest import (
    Manifest,
    Overrides,
    default_model_name,
    parse,
    parse_legacy,
    resolve,
)

FULL = {
    "specificationVersion": "1.0",
    "runtime": "python3",
    "engine": {"engineName": "PyTorch", "engineVersion": 2.9},
    "model": {"modelName": "m", "handler": "service:handle", "modelVersion": "1.10"},
    "userData": {"x": [1]},
}


def said(manifest: Manifest, **overrides: str) -> str:
    with pytest.raises(InvalidModel) as caught:
        resolve(manifest, Overrides(**overrides))
    return str(caught.value)


def test_all_fields_of_a_manifest_are_read() -> None:
    resolved = resolve(parse(json.dumps(FULL)), Overrides())
    assert (resolved.name, resolved.handler) == ("m", "service:handle")
    assert (resolved.runtime, resolved.version, resolved.engine) == ("python3", "1.10", "PyTorch")


def test_the_registration_wins_over_the_manifest_and_the_settings_come_last() -> None:
    asked = Overrides(
        model_name="n", handler="h:f", runtime="python2", default_name="d", default_handler="d:d"
    )
    resolved = resolve(parse(json.dumps(FULL)), asked)
    assert (resolved.name, resolved.handler, resolved.runtime) == ("n", "h:f", "python2")

    weak = Overrides(default_name="d", default_handler="d:d")
    assert resolve(parse(json.dumps(FULL)), weak).handler == "service:handle"
    assert resolve(Manifest(), weak).name == "d"
    assert resolve(Manifest(), weak).handler == "d:d"
    assert resolve(Manifest(), weak).runtime == "python"


def test_the_first_thing_that_is_missing_is_told() -> None:
    bad = parse('{"runtime": "ruby", "engine": {}, "model": {}}')
    assert said(bad) == "Model name is not defined."
    assert said(bad, model_name="m") == "Model handler is not defined."
    assert said(bad, model_name="m", handler="h") == "Runtime is not defined or invalid."
    assert (
        said(bad, model_name="m", handler="h", runtime="python")
        == "engineName is required in <engine>."
    )


@pytest.mark.parametrize("character", ["\0", "\n", "\x1b", "\x7f", "\x85"])
def test_a_name_with_control_characters_is_refused_wherever_it_comes_from(character: str) -> None:
    name = f"a{character}b"
    refusal = (
        "The model's name must not contain control characters; the registration may give it another"
    )
    bad = parse(json.dumps({"model": {"modelName": name, "handler": "h"}}))
    assert refusal in said(bad)
    assert refusal in said(parse(json.dumps(FULL)), model_name=name)
    assert resolve(bad, Overrides(model_name="é m/1")).name == "é m/1"


@pytest.mark.parametrize("text", ['{"runtime": null}', '{"runtime": "Python"}', '{"runtime": 3}'])
def test_a_runtime_that_is_none_can_be_repaired_by_the_registration(text: str) -> None:
    manifest = parse(text)
    assert said(manifest, model_name="m", handler="h") == "Runtime is not defined or invalid."
    asked = Overrides(model_name="m", handler="h", runtime="python")
    assert resolve(manifest, asked).runtime == "python"


@pytest.mark.parametrize("text", ['{"model": null}', "{}"])
def test_a_manifest_without_a_model_needs_a_name_from_elsewhere(text: str) -> None:
    assert said(parse(text)) == "Model name is not defined."
    assert resolve(parse(text), Overrides(model_name="m", handler="h")).name == "m"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "null",
        "[]",
        '"x"',
        "{",
        "{'model': 1",
        '{"model": []}',
        '{"model": {"handler": {}}}',
        '{"model": {"modelName": ["m"]}}',
        '{"model": {"modelName": "\\ud800"}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises(InvalidModel, match=r"Failed to parse signature\.json\."):
        parse(text)


def test_numbers_and_truth_values_are_taken_as_their_text() -> None:
    text = '{"model": {"modelName": true, "handler": 7, "modelVersion": 1.10}}'
    manifest = parse(text)
    assert (manifest.model_name, manifest.handler, manifest.version) == ("true", "7", "1.10")
    assert manifest.text == text


def test_a_legacy_manifest_is_read() -> None:
    fields = {
        "Engine": {"MXNet": 0.12},
        "Model-Archive-Description": "x",
        "Model": {"Model-Name": "old", "Service": "mxnet_vision_service.py", "Symbol": "s"},
    }
    resolved = resolve(parse_legacy(json.dumps(fields)), Overrides())
    assert (resolved.name, resolved.handler) == ("old", "mxnet_vision_service.py")
    assert (resolved.version, resolved.engine) == ("snapshot", "MXNet")


def test_a_legacy_manifest_without_a_service_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"Missing Service entry in MANIFEST\.json"):
        parse_legacy('{"Model": {"Model-Name": "old"}}')


def test_a_legacy_engine_that_is_not_mxnet_is_refused() -> None:
    manifest = parse_legacy('{"Engine": {"MXNet": "x"}, "Model": {"Service": "s"}}')
    assert said(manifest, model_name="m") == "engineName is required in <engine>."


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "model",
                    "modelName",
                    "handler",
                    "runtime",
                    "engine",
                    "engineName",
                    "Model",
                    "Service",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.sampled_from([parse, parse_legacy]))
def test_any_json_is_read_or_refused(value: object, read: object) -> None:
    assert callable(read)
    try:
        resolved = resolve(read(json.dumps(value)), Overrides(default_handler="h"))
    except InvalidModel:
        return
    assert resolved.name and resolved.handler and resolved.runtime


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("no.na-me_1.mar", "no_na_me_1"),
        ("noop.mar", "noop"),
        ("old.model", "old"),
        ("sub/dir/a.mar", "a"),
        ("zh", "zh"),
        ("zh/", "zh"),
        ("a.b", "a_b"),
        ("m.tar.gz", "m"),
        ("http://host:80/x/m.mar?v=1.2#f", "m"),
        ("/opt/ml/model", "model"),
        ("é.mar", "_"),
        ("/", None),
        ("http://host", None),
        ("http://[", None),
    ],
)
def test_a_start_up_model_without_a_name_is_called_after_its_place(
    url: str, name: str | None
) -> None:
    assert default_model_name(url) == name
