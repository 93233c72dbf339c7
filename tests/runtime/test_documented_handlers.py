"""The handlers that docs/handlers.md shows, served."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from mmserve.wire.messages import Loaded
from tests.runtime.workers import Process, Request

PAGE = Path(__file__).parents[2] / "docs" / "handlers.md"
SOURCES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def served(
    start: Callable[..., Process], model: Callable[[Mapping[str, str]], Path], source: str
) -> Process:
    process = start()
    process.hello()
    named = re.search(r"the handler `(.+?)`", source)
    assert named is not None
    loaded = process.load(
        model({"service.py": source, "labels.json": '["cat", "dog"]'}), named[1], batch_size=2
    )
    assert isinstance(loaded, Loaded), loaded
    return process


def test_the_function_on_the_page_works(
    start: Callable[..., Process], model: Callable[[Mapping[str, str]], Path]
) -> None:
    answers = served(start, model, SOURCES[0]).predict(b"one", b"four")
    assert [answer.text for answer in answers] == [
        '{\n  "label": "dog"\n}',
        '{\n  "label": "cat"\n}',
    ]


def test_the_class_on_the_page_works(
    start: Callable[..., Process], model: Callable[[Mapping[str, str]], Path]
) -> None:
    process = served(start, model, SOURCES[1])
    assert process.ask(Request(b"hey", "text/plain")).text == "HEY!!"
