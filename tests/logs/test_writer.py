from pathlib import Path

from mmserve.logs.backlog import Backlog
from mmserve.logs.files import LogFile
from mmserve.logs.writer import Outlet, Writer


class Fragile(LogFile):
    """Has a bug: it cannot bear a certain line."""

    def write(self, data: memoryview) -> int:
        if b"bad" in bytes(data):
            raise ValueError("no such line was thought of")
        return super().write(data)


def test_a_bug_costs_the_lines_at_hand_and_not_those_after_them(tmp_path: Path) -> None:
    reports: list[str] = []
    backlog, paper = Backlog(1000), Fragile(tmp_path / "a.log")
    paper.open(0.0)
    writer = Writer("test", [Outlet(backlog, paper, str, reports.append)])
    writer.start()
    for line in ("one\n", "bad\n", "two\n"):
        backlog.put(line)
        assert writer.flush(10)
    writer.close(10)
    assert (tmp_path / "a.log").read_text() == "one\ntwo\n"
    assert len(reports) == 1
    assert "ValueError" in reports[0]


def test_lines_above_the_limit_are_counted_where_they_are_missing(tmp_path: Path) -> None:
    backlog, paper = Backlog(1000), LogFile(tmp_path / "a.log")
    paper.open(0.0)
    writer = Writer("test", [Outlet(backlog, paper, lambda text: f"[{text}]\n", print)])
    for number in range(100):  # before the thread runs, so that nothing is taken away
        backlog.put(f"{number}\n")
    writer.start()
    assert writer.flush(10)
    backlog.put("after\n")
    writer.close(10)
    *kept, notice, after = (tmp_path / "a.log").read_text().splitlines()
    assert kept == [str(number) for number in range(len(kept))]
    assert notice == (
        f"[{100 - len(kept)} lines are missing here: they came faster than they could be written]"
    )
    assert after == "after"
