"""Each fuzz target, for a moment: that it still runs, and what hypothesis thinks of."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.drive import load, maker, targets

INPUTS = 150


@pytest.mark.parametrize("path", targets(), ids=lambda path: path.stem)
def test_made_inputs_cause_nothing_odd(path: Path) -> None:
    target = load(path)
    make, chance = maker(target), random.Random(11)
    for _ in range(INPUTS):
        target.one_input(make(chance))


@pytest.mark.parametrize("path", targets(), ids=lambda path: path.stem)
def test_any_bytes_cause_nothing_odd(path: Path) -> None:
    target = load(path)

    @settings(max_examples=INPUTS, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.binary(max_size=600))
    def any_bytes(data: bytes) -> None:
        target.one_input(data)

    any_bytes()
