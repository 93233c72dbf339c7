"""Handler texts and module paths: quiet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.runtime.failures import HandlerProblem
from mmserve.runtime.paths import HandlerName, clashes, module_path, parse_handler


@pytest.mark.parametrize(
    "text, expected",
    [
        ("service:handle", ("", "service", "handle")),
        ("service", ("", "service", "handle")),
        ("service.py:handle", ("", "service", "handle")),
        ("pkg.module:run", ("", "pkg.module", "run")),
        ("dir/module.py:run", ("dir", "module", "run")),
        ("a/b/module.py", ("a/b", "module", "handle")),
        ("/abs/dir/service.py:handle", ("/abs/dir", "service", "handle")),
        ("/service.py:handle", ("/", "service", "handle")),
        (r"C:\m\service.py:handle", (r"C:\m", "service", "handle")),
        (r"C:\m\service.py", (r"C:\m", "service", "handle")),
        ("handler-v2.py:handle", ("", "handler-v2", "handle")),
        ("handler.v2.py:handle", ("", "handler.v2", "handle")),
        ("a:b:c", ("", "a:b", "c")),
        (" service:handle\n", ("", "service", "handle")),
    ],
)
def test_a_handler_text_is_taken_apart(text: str, expected: tuple[str, str, str]) -> None:
    assert parse_handler(text) == HandlerName(*expected)


@pytest.mark.parametrize(
    "text, missing",
    [("service:", "no function"), (":handle", "no module"), ("", "no module"), ("dir/:f", "no mo")],
)
def test_a_handler_text_with_a_part_missing_says_which(text: str, missing: str) -> None:
    with pytest.raises(HandlerProblem, match=missing):
        parse_handler(text)


@given(st.text())
def test_any_text_is_a_handler_name_or_a_problem(text: str) -> None:
    try:
        name = parse_handler(text)
    except HandlerProblem:
        return
    assert name.module and name.function


def test_the_module_path_has_multi_model_servers_order() -> None:
    handler = parse_handler("lib/service.py:handle")
    assert module_path(handler, "/m", "/one:two::", "/opt/mms") == [
        "/m/lib",
        "/one",
        "/m/two",
        "/m",
        "/m/code",
        "/opt/mms",
    ]


def test_each_directory_is_on_the_path_once_and_no_place_of_packages_is() -> None:
    handler = parse_handler("code/../service.py:handle")
    home = "/usr/lib/python3/dist-packages/"
    assert module_path(handler, "/m", "/m/code:/m", home) == ["/m", "/m/code"]


def test_only_an_absolute_handler_directory_leaves_the_model() -> None:
    assert module_path(parse_handler("/abs/service.py"), "/m", "")[0] == "/abs"


def test_a_name_that_a_fork_already_holds_asks_for_a_fresh_start() -> None:
    loaded = {"tqdm": "/site-packages/tqdm/__init__.py", "json": "/lib/json/__init__.py"}
    assert clashes(["service", "utils"], loaded) is None
    reason = clashes(["service", "tqdm"], loaded)
    assert reason is not None and "'tqdm'" in reason
    assert clashes([], loaded) is None
