"""How many CPUs a process may use, from files as the kernel writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmserve import platform


class Kernel:
    """A /proc/PID and control groups in a folder, written as the kernel does."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.tree = folder / "proc", folder / "cgroup"
        self.proc.mkdir()
        self.write("cgroup", "")
        self.write("mountinfo", "22 1 0:21 / /proc rw - proc proc rw\n")

    def write(self, name: str, text: str) -> None:
        (self.proc / name).write_text(text)

    def mount(self, kind: str, options: str = "rw", root: str = "/", name: str = "") -> Path:
        top = self.tree / name
        top.mkdir(parents=True, exist_ok=True)
        with (self.proc / "mountinfo").open("a") as file:
            file.write(f"30 22 0:26 {root} {top} rw,nosuid shared:4 - {kind} cgroup {options}\n")
        return top

    def quota(self) -> float | None:
        return platform.cpu_quota(self.proc)


@pytest.fixture
def kernel(tmp_path) -> Kernel:
    return Kernel(tmp_path)


def limit(group: Path, **files: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (group / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize(
    ("written", "quota"),
    [
        ("50000 100000\n", 0.5),
        ("100000 100000\n", 1),
        ("250000 100000\n", 2.5),
        ("max 100000\n", None),
    ],
)
def test_version_2_has_quota_and_period_in_one_file(kernel, written, quota):
    kernel.write("cgroup", "0::/user/app\n")
    limit(kernel.mount("cgroup2") / "user/app", cpu__max=written)
    assert kernel.quota() == quota


@pytest.mark.parametrize(
    ("quota_us", "quota"), [("50000\n", 0.5), ("250000\n", 2.5), ("-1\n", None)]
)
def test_version_1_has_two_files(kernel, quota_us, quota):
    kernel.write("cgroup", "3:cpu,cpuacct:/app\n1:name=systemd:/\n")
    group = kernel.mount("cgroup", "rw,cpu,cpuacct", name="cpu,cpuacct") / "app"
    limit(group, cpu__cfs_quota_us=quota_us, cpu__cfs_period_us="100000\n")
    assert kernel.quota() == quota


def test_the_tightest_group_above_counts_too(kernel):
    kernel.write("cgroup", "0::/a/b\n")
    top = kernel.mount("cgroup2")
    limit(top / "a", cpu__max="150000 100000")
    limit(top / "a/b", cpu__max="400000 100000")
    assert kernel.quota() == 1.5


def test_a_machine_may_have_both_versions(kernel):
    kernel.write("cgroup", "4:memory:/x\n3:cpu:/x\n0::/x\n")
    kernel.mount("cgroup2", name="unified")
    kernel.mount("cgroup", "rw,memory", name="memory")
    group = kernel.mount("cgroup", "rw,cpu", name="cpu") / "x"
    limit(group, cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    assert kernel.quota() == 3


def test_a_container_sees_only_its_own_part_of_the_tree(kernel):
    kernel.write("cgroup", "3:cpu:/docker/1234\n")
    top = kernel.mount("cgroup", "rw,cpu", root="/docker/1234", name="cpu")
    limit(top, cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert kernel.quota() == 2


@pytest.mark.parametrize("path", ["/../../elsewhere", "/other/group"])
def test_a_group_outside_of_what_is_mounted_is_the_mounted_one(kernel, path):
    kernel.write("cgroup", f"0::{path}\n")
    limit(kernel.mount("cgroup2", root="/docker/1234"), cpu__max="200000 100000")
    assert kernel.quota() == 2


def test_a_mount_point_may_have_a_blank_in_its_name(kernel):
    kernel.write("cgroup", "0::/\n")
    top = kernel.tree / "a b"
    limit(top, cpu__max="100000 100000")
    line = f"30 22 0:26 / {str(top).replace(' ', chr(92) + '040')} rw - cgroup2 cgroup2 rw\n"
    kernel.write("mountinfo", line)
    assert kernel.quota() == 1


@pytest.mark.parametrize("written", ["", "garbage", "1 2 3", "0 100000", "100000 0"])
def test_what_makes_no_sense_is_no_limit(kernel, written):
    kernel.write("cgroup", "0::/\n")
    limit(kernel.mount("cgroup2"), cpu__max=written)
    assert kernel.quota() is None


def test_without_proc_no_limit_is_known(tmp_path):
    assert platform.control_groups("cpu", tmp_path) == []
    assert platform.cpu_quota(tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_a_process_bound_to_one_cpu_counts_one():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from mmserve import platform; print(*platform.cpu_count())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split()[0] == "1"


def test_this_process_may_use_at_least_one():
    count, source = platform.cpu_count()
    assert 1 <= count <= (os.cpu_count() or 1)
    assert source
