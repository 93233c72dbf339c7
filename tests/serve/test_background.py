"""A server in the background, started and stopped by its own command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.e2e.server import COMMAND, PID, write_mar


def test_the_file_beside_the_logs_is_left_to_crashes_once_the_server_is_ready(home: Path) -> None:
    store, logs = home / "store", home / "logs"
    store.mkdir()
    write_mar(store / "m.mar", PID)
    config = home / "config.properties"
    config.write_text(
        "inference_address=http://127.0.0.1:0\nmanagement_address=http://127.0.0.1:0\n"
        f"model_store={store}\npreload_imports=none\ndefault_workers_per_model=1\n"
    )
    places = {"TMPDIR": str(home), "LOG_LOCATION": str(logs), "METRICS_LOCATION": str(logs)}
    options = {"cwd": home, "env": os.environ | places, "timeout": 60, "check": True}
    words = [str(COMMAND), "--start", "--models", "m=m.mar", "--mms-config", str(config)]
    subprocess.run(words, stdout=subprocess.DEVNULL, **options)  # type: ignore[call-overload]
    subprocess.run([str(COMMAND), "--stop"], **options)  # type: ignore[call-overload]
    log = (logs / "mms_log.log").read_text()
    console = (logs / "console.log").read_text()
    assert "server stopped" in log
    assert "listening" in console  # what a start that fails would show
    assert "server stopped" not in console
