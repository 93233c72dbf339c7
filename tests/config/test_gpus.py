"""How many GPUs there are."""

import contextlib
import os

import pytest

from mmserve.config.gpus import detected, visible
from mmserve.platform import OtherProcess


def tool(folder, script):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"}


@pytest.mark.parametrize(
    ("script", "count"),
    [
        ("echo 0; echo 1", 2),
        ("echo index; echo 0", 1),
        ("", 0),
        ("echo 0; exit 9", 0),
        ("echo NVIDIA-SMI has failed", 0),
        ("kill -9 $$", 0),
    ],
)
def test_each_line_with_an_index_is_a_gpu_and_any_failure_is_none(tmp_path, script, count):
    assert detected(tool(tmp_path, script)) == count


def test_without_the_tool_there_is_none(tmp_path):
    assert detected({"PATH": str(tmp_path)}) == 0


def test_a_tool_that_cannot_be_run_is_none(tmp_path):
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert detected({"PATH": str(tmp_path)}) == 0


def test_a_tool_that_hangs_is_ended_with_its_children(tmp_path):
    environ = tool(tmp_path, f"sleep 600 & echo $! > {tmp_path}/pid; wait")
    assert detected(environ, limit_s=0.5) == 0
    # It may not have come that far, and it may be reaped already.
    with (
        contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError),
        OtherProcess(int((tmp_path / "pid").read_text())) as child,
    ):
        assert child.wait(30)


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        ("0,1", 2),
        (" 0 , 3 ", 2),
        ("0,9,1", 1),
        ("GPU-8932f937,GPU-1", 2),
        ("0,1,2,3,0,1", 4),
        ("x", 0),
    ],
)
def test_cuda_visible_devices_hides_gpus(devices, count):
    assert visible(4, devices) == count
