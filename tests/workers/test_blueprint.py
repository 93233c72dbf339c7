"""Which way a worker starts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mmserve.workers.blueprint import Blueprint, choose_way

MODEL = Blueprint(
    model_name="m",
    model_dir="/m",
    handler="service:handle",
    manifest="",
    batch_size=1,
    decode_input=True,
    max_response_size=1000,
    environ={},
)
ALL_SET: dict[str, Any] = {
    "worker_start": "fork",
    "has_library": True,
    "is_settled": True,
    "clash": None,
}


@pytest.mark.parametrize(
    ("model", "circumstances", "kind"),
    [
        ({}, {}, "library"),
        ({}, {"clash": "tqdm is the archive's own"}, "fresh"),
        ({}, {"worker_start": "fresh"}, "fresh"),
        ({}, {"has_library": False}, "bare"),
        ({}, {"has_library": False, "clash": "json is the archive's own"}, "fresh"),
        (
            {"names_libraries": False},
            {"has_library": False, "is_settled": False, "clash": "json is the archive's own"},
            "fresh",
        ),
        ({"names_libraries": True}, {"has_library": False, "is_settled": False}, "wait"),
        ({"names_libraries": False}, {"has_library": False, "is_settled": False}, "bare"),
    ],
)
def test_the_way_follows_from_the_model_and_the_circumstances(
    model: dict[str, Any], circumstances: dict[str, Any], kind: str
) -> None:
    way = choose_way(msgspec.structs.replace(MODEL, **model), **(ALL_SET | circumstances))
    assert way.kind == kind
    if kind == "fresh":
        assert way.reason
