"""The settings as text."""

import pytest

from mmserve.config import report
from mmserve.config.keys import KEYS
from mmserve.config.launch import Arguments
from mmserve.config.load import Loaded, load_settings


@pytest.fixture
def loaded(tmp_path) -> Loaded:
    (tmp_path / "config.properties").write_text(
        "keystore_pass=hunter2\n"
        "job_queue_size=7\n"
        "default_response_timeout=2\n"
        "load_models=a=https://user:word@host/a.mar?X-Amz-Signature=abc,b=b.mar\n"
    )
    return load_settings(Arguments(), {}, tmp_path, with_gpus=False)


def line(loaded: Loaded, name: str) -> str:
    (found,) = (text for text in report.lines(loaded) if text.split(" ")[0] == name)
    return found


def test_every_setting_has_a_line_with_value_unit_and_origin(loaded):
    assert len(report.lines(loaded)) == len(KEYS) + 1
    assert " ".join(line(loaded, "job_queue_size").split()) == (
        "job_queue_size = 7 requests [config.properties, line 2]"
    )
    assert "[built in]" in line(loaded, "unregister_model_timeout")


def test_what_a_value_amounts_to_stands_beside_it(loaded):
    assert "2 minutes (120 seconds)" in line(loaded, "default_response_timeout")
    assert "not set (120 seconds)" in line(loaded, "load_timeout_seconds")
    assert "-1 (not used)" in line(loaded, "default_response_timeout_seconds")
    assert "at start)" in line(loaded, "default_workers_per_model")


def test_seconds_that_win_are_said_to(tmp_path):
    (tmp_path / "config.properties").write_text(
        "default_response_timeout_seconds=9\nmanagement_address=http://127.0.0.1:8080"
    )
    loaded = load_settings(Arguments(), {}, tmp_path, with_gpus=False)
    assert "default_response_timeout_seconds decides" in line(loaded, "default_response_timeout")
    assert "9 seconds" in line(loaded, "default_response_timeout_seconds")
    assert "one listener for both" in line(loaded, "management_address")


def test_limits_that_debugging_lifts_are_said_to_be_none(tmp_path):
    (tmp_path / "config.properties").write_text("debug=true\ndefault_response_timeout_seconds=9")
    loaded = load_settings(Arguments(), {}, tmp_path, with_gpus=False)
    assert "9 seconds (not used)" in line(loaded, "default_response_timeout_seconds")
    for name in ("load_timeout_seconds", "max_queue_wait_seconds"):
        assert "not set (no limit)" in line(loaded, name)


def test_secrets_are_masked(loaded):
    text = "\n".join(report.lines(loaded))
    for secret in ("hunter2", "user:word", "abc"):
        assert secret not in text
    assert "a=https://****@host/a.mar?****,b=b.mar" in text
