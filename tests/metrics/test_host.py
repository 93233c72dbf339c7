import subprocess
import sys
from pathlib import Path

from mmserve.metrics.host import HostUsage, hostname
from tests.metric_lines import parse_line

ALL = [
    ("CPUUtilization", "Percent"),
    ("DiskAvailable", "Gigabytes"),
    ("DiskUsage", "Gigabytes"),
    ("DiskUtilization", "Percent"),
    ("MemoryAvailable", "Megabytes"),
    ("MemoryUsed", "Megabytes"),
    ("MemoryUtilization", "Percent"),
]
MEMINFO = "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 250 kB\nOdd:\n"


def told(usage: HostUsage) -> dict[str, float]:
    return {name: value for name, _, value in usage.sample()}


def test_the_first_sample_of_this_host_has_every_metric_in_its_range() -> None:
    usage = HostUsage()
    while not told(usage).get("CPUUtilization"):
        pass  # busy, so that the share cannot be 0 for long
    sample = usage.sample()
    while len(sample) < len(ALL):  # no tick of the clock since the one before
        sample = usage.sample()
    assert [(name, unit) for name, unit, _ in sample] == ALL
    for name, unit, value in sample:
        assert value >= 0, name
        assert unit != "Percent" or value <= 100, name


def test_the_lines_of_a_sample_can_be_parsed() -> None:
    for line in HostUsage().lines(hostname=hostname(), timestamp=1_700_000_000):
        metric = parse_line(line)
        assert metric is not None
        assert metric.dimensions == (("Level", "Host"),)
        assert metric.hostname == hostname()


def test_the_processor_share_is_that_of_the_interval(tmp_path: Path) -> None:
    stat, meminfo = tmp_path / "stat", tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 1 1 1\n")
    usage = HostUsage(proc=str(tmp_path))
    stat.write_text("cpu  130 5 110 840 10 2 2 1 50 0\ncpu0 1 1 1 1\n")
    assert told(usage)["CPUUtilization"] == 50.0
    assert "CPUUtilization" not in told(usage)  # no time has passed: no number is better than 0
    stat.write_text("cpu  140 5 110 800 10 2 2 1 50 0\n")  # idle time went back
    assert "CPUUtilization" not in told(usage)


def test_memory_is_what_could_be_had(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    sample = told(HostUsage(proc=str(tmp_path)))
    assert sample["MemoryAvailable"] == round(250 / 1024, 3)
    assert sample["MemoryUsed"] == round(750 / 1024, 3)
    assert sample["MemoryUtilization"] == 75.0


def test_what_is_not_told_is_left_out(tmp_path: Path) -> None:
    usage = HostUsage(proc=str(tmp_path / "none"), root=str(tmp_path / "none"))
    assert usage.sample() == []
    (tmp_path / "stat").write_text("junk")
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\nMemAvailable: lots\n")
    assert set(told(HostUsage(proc=str(tmp_path)))) == {
        "DiskAvailable",
        "DiskUsage",
        "DiskUtilization",
    }


def test_a_sample_needs_no_library_that_takes_long_to_import() -> None:
    program = (
        "import sys; from mmserve.metrics.host import HostUsage; HostUsage().sample();"
        "assert 'psutil' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
