"""How many GPUs there are, as Multi Model Server finds out: `nvidia-smi` lists them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

#: `nvidia-smi` wakes each device up, which can take a second per device.
QUERY_LIMIT_S = 10.0


def detected(environ: Mapping[str, str], limit_s: float = QUERY_LIMIT_S) -> int:
    """GPUs that a process with this environment can use; 0 for any failure to find out."""
    if not (tool := _on_path("nvidia-smi", environ)):
        return 0
    return visible(_query(tool, environ, limit_s), environ.get("CUDA_VISIBLE_DEVICES"))


def visible(count: int, devices: str | None) -> int:
    """Of `count` devices those that `CUDA_VISIBLE_DEVICES` leaves; None: it is not set.

    Source: CUDA C Programming Guide, environment variables: what follows the first invalid
    entry is not visible either.
    """
    if devices is None:
        return count
    left = 0
    for device in devices.split(","):
        name = device.strip()
        is_index = name.isascii() and name.isdigit() and int(name[:10]) < count
        if not is_index and not name.startswith(("GPU-", "MIG-")):
            break
        left += 1
    return min(left, count)


def _on_path(name: str, environ: Mapping[str, str]) -> str | None:
    for folder in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, name)  # noqa: PTH118 - pathlib would be imported for this
        if os.access(path, os.X_OK):
            return path
    return None


def _query(tool: str, environ: Mapping[str, str], limit_s: float) -> int:
    import signal  # seldom needed, and slow to import
    import subprocess

    try:
        process = subprocess.Popen(
            [tool, "--query-gpu=index", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(environ),
            start_new_session=True,
        )
    except OSError:
        return 0
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A driver that hangs in the kernel keeps it from ending: do not wait for long.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        assert process.stdout is not None
        process.stdout.close()
        return 0
    if process.returncode != 0:
        return 0
    return sum(line.strip().isdigit() for line in said.splitlines())
