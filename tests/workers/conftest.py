from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.house import Write, write_model


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(predict: str, *, name: str = "m", load: str = "pass", setup: str = "") -> Path:
        return write_model(tmp_path / name, predict, load=load, setup=setup)

    return written
