"""Real files, threads and pipes."""

import gzip
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmserve.config.settings import Settings
from mmserve.logs.journal import Journal, open_journal
from mmserve.logs.output import OutputLine, worker_name

FILES = {"access_log.log", "mms_log.log", "mms_metrics.log", "model_metrics.log", "model_log.log"}
ISO = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"
METRIC = "Requests2XX.Count:1|#Level:Host|#hostname:h,timestamp:1700000000"


class Stdout:
    """A pipe in the place of standard output."""

    def __init__(self) -> None:
        self.reading, self.fd = os.pipe()

    def text(self) -> str:
        """All that was written; nothing can be after it."""
        os.close(self.fd)
        with open(self.reading, closefd=False) as file:
            return file.read()


@pytest.fixture
def stdout() -> Iterator[Stdout]:
    pipe = Stdout()
    yield pipe
    os.close(pipe.reading)


def settings(folder: Path, **keys: str) -> Settings:
    return Settings(log_location=str(folder), metrics_location=str(folder), **keys)  # type: ignore[arg-type]  # all of these are text


def say_everything(journal: Journal) -> None:
    journal.access('/127.0.0.1:50000 "POST /predictions/m HTTP/1.1" 200 5')
    journal.metric(METRIC)
    journal.model_metric("Hits.Count:2|#ModelName:m|#hostname:h,timestamp:1700000000")
    journal.model(worker_name("m", 1), 4711, "stdout", "hello")
    journal.model(worker_name("m", 1), 4711, "stderr", "careful")
    journal.server(logging.INFO, "mmserve.serve", "ready", {"load_s": 1.8})
    journal.server(logging.WARNING, "mmserve.serve", "tight")
    journal.announce("Model server started.")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_all_files_exist_from_the_start(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path / "logs"), stdout=None):
        assert {path.name for path in (tmp_path / "logs").iterdir()} == FILES


def test_metrics_have_a_folder_of_their_own(tmp_path: Path) -> None:
    asked = Settings(log_location=str(tmp_path / "l"), metrics_location=str(tmp_path / "m"))
    with open_journal(asked, stdout=None):
        assert {p.name for p in (tmp_path / "m").iterdir()} == {
            "mms_metrics.log",
            "model_metrics.log",
        }


def test_each_line_is_once_in_its_file_in_the_form_of_multi_model_server(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:
        say_everything(journal)
        assert journal.flush()
        access, metric, model_metric = (
            lines(tmp_path / name)
            for name in ("access_log.log", "mms_metrics.log", "model_metrics.log")
        )
        worker, server = lines(tmp_path / "model_log.log"), lines(tmp_path / "mms_log.log")
    life = r"com\.amazonaws\.ml\.mms\.wlm\.WorkerLifeCycle"
    for found, wanted in (
        (access, [r'/127\.0\.0\.1:50000 "POST /predictions/m HTTP/1\.1" 200 5']),
        (metric, [re.escape(METRIC)]),
        (model_metric, [r"Hits\.Count:2\|#ModelName:m\|#hostname:h,timestamp:1700000000"]),
    ):
        assert len(found) == len(wanted)
        for line, text in zip(found, wanted, strict=True):
            assert re.fullmatch(f"{ISO} - {text}", line)
    for line, text in zip(
        worker + server,
        [
            rf"\[INFO \] W-m-1-stdout {life} - hello",
            rf"\[WARN \] W-m-1-stderr {life} - careful",
            r"\[INFO \] main mmserve\.serve - ready load_s=1\.8",
            r"\[WARN \] main mmserve\.serve - tight",
            r"\[INFO \] main mmserve\.serve - Model server started\.",
        ],
        strict=True,
    ):
        assert re.fullmatch(f"{ISO} {text}", line)


def test_the_terminal_sees_the_servers_lines_and_not_those_of_requests(
    tmp_path: Path, stdout: Stdout
) -> None:
    with open_journal(settings(tmp_path), stdout=stdout.fd) as journal:
        say_everything(journal)
    seen = stdout.text()
    assert "ready" in seen
    assert "tight" in seen
    assert "\nModel server started.\n" in seen
    for word in ("predictions", "Requests2XX", "Hits", "hello", "careful"):
        assert word not in seen


def test_standard_output_can_be_left_to_itself(tmp_path: Path, stdout: Stdout) -> None:
    with open_journal(settings(tmp_path), stdout=stdout.fd) as journal:
        journal.server(logging.INFO, "mmserve.serve", "before")
        journal.leave_stdout()
        journal.server(logging.INFO, "mmserve.serve", "after")
    seen = stdout.text()
    assert "before" in seen
    assert "after" not in seen
    assert "after" in (tmp_path / "mms_log.log").read_text()


def test_lines_that_have_no_file_stay_on_standard_output(tmp_path: Path, stdout: Stdout) -> None:
    with open_journal(settings(tmp_path, log_to="stdout"), stdout=stdout.fd) as journal:
        journal.leave_stdout()
        journal.server(logging.INFO, "mmserve.serve", "after")
    assert "after" in stdout.text()


def test_all_lines_go_to_standard_output_and_no_file_is_made(
    tmp_path: Path, stdout: Stdout
) -> None:
    with open_journal(settings(tmp_path / "l", log_to="stdout"), stdout=stdout.fd) as journal:
        say_everything(journal)
    assert not (tmp_path / "l").exists()
    seen = stdout.text().splitlines()
    assert len(seen) == 8
    assert re.fullmatch(rf"{ISO} \[INFO \] main ACCESS_LOG - /127.*", seen[0])
    assert re.fullmatch(rf"{ISO} \[INFO \] main MMS_METRICS - Requests2XX.*", seen[1])
    assert re.fullmatch(rf"{ISO} \[INFO \] main MODEL_METRICS - Hits.*", seen[2])
    assert seen[-1] == "Model server started."


def test_both_means_both(tmp_path: Path, stdout: Stdout) -> None:
    with open_journal(settings(tmp_path, log_to="both"), stdout=stdout.fd) as journal:
        say_everything(journal)
    assert len(stdout.text().splitlines()) == 8
    assert len(lines(tmp_path / "access_log.log")) == 1


def test_the_level_hides_the_servers_lines_and_all_on_standard_output(
    tmp_path: Path, stdout: Stdout
) -> None:
    asked = settings(tmp_path, log_to="both", log_level="warning")
    with open_journal(asked, stdout=stdout.fd) as journal:
        say_everything(journal)
    seen = stdout.text().splitlines()
    assert [line.rpartition(" - ")[2] for line in seen] == [
        "careful",
        "tight",
        "Model server started.",
    ]
    assert len(lines(tmp_path / "access_log.log")) == 1
    assert "ready" not in (tmp_path / "mms_log.log").read_text()


def test_json_lines_are_objects_with_their_fields(tmp_path: Path, stdout: Stdout) -> None:
    asked = settings(tmp_path, log_to="both", log_format="json")
    with open_journal(asked, stdout=stdout.fd) as journal:
        journal.access("the line", {"request_id": "r1", "status": 200})
        journal.server(logging.ERROR, "mmserve.x", "bad\nthing \udcff", {"why": {1}, "ts": 0})
        say_everything(journal)
    for text in (stdout.text(), *((tmp_path / name).read_text() for name in FILES)):
        for line in text.splitlines():
            found = json.loads(line)
            assert found["ts"].endswith("Z")
            assert found["level"] in ("INFO", "WARN", "ERROR")
            assert found["message"]
    first = json.loads(lines(tmp_path / "access_log.log")[0])
    assert (first["request_id"], first["status"], first["logger"]) == ("r1", 200, "ACCESS_LOG")
    assert json.loads(lines(tmp_path / "model_log.log")[0])["pid"] == 4711


def test_a_folder_that_cannot_be_written_costs_one_warning_and_no_line(
    tmp_path: Path, stdout: Stdout
) -> None:
    (tmp_path / "taken").write_text("")
    with open_journal(settings(tmp_path / "taken" / "logs"), stdout=stdout.fd) as journal:
        say_everything(journal)
    seen = stdout.text().splitlines()
    warned = [line for line in seen if "log files cannot be written" in line]
    assert len(warned) == 1
    assert str(tmp_path / "taken" / "logs") in warned[0]
    assert "Not a directory" in warned[0]
    assert len(seen) == 1 + 8


def test_without_folder_and_standard_output_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with open_journal(settings(tmp_path / "taken" / "logs"), stdout=None) as journal:
        say_everything(journal)
        assert not journal.keeps_access


def test_a_worker_cannot_forge_a_line(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.model("W-m-1", 1, "stdout", "a\r2026-01-01T00:00:00,000 [ERROR] x\x1b[2J\u2028b")
        journal.model("W-m-1", 1, "stdout", "lone \udcff")
        journal.model_metric("A.Count:1|#|#hostname:h,timestamp:1\nB.Count:1")
    assert len(lines(tmp_path / "model_log.log")) == 2
    assert len(lines(tmp_path / "model_metrics.log")) == 1


def test_output_lines_are_told_apart_from_metrics(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.model_lines("W-m-1", 1, "stdout", [OutputLine("text"), OutputLine(METRIC, True)])
    assert lines(tmp_path / "model_log.log")[0].endswith(" - text")
    assert lines(tmp_path / "model_metrics.log")[0].endswith(f" - {METRIC}")


def test_lines_of_many_threads_are_all_there(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:

        def talk(name: int) -> None:
            for number in range(2000):
                journal.access(f"{name} {number}")

        threads = [threading.Thread(target=talk, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    said = [line.rpartition(" - ")[2].split() for line in lines(tmp_path / "access_log.log")]
    for name in range(4):
        assert [int(n) for who, n in said if who == str(name)] == list(range(2000))


def test_after_the_end_lines_are_dropped_quietly(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.access("before")
    say_everything(journal)
    assert not journal.flush()
    assert len(lines(tmp_path / "access_log.log")) == 1


def test_files_moved_by_logrotate_are_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "access_log.log"
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.access("one")
        assert journal.flush()
        path.rename(tmp_path / "access_log.log.1")
        journal.reopen()
        journal.access("two")
    assert [line[-3:] for line in lines(tmp_path / "access_log.log.1")] == ["one"]
    assert [line[-3:] for line in lines(path)] == ["two"]


def test_a_file_of_100_mb_is_rolled_and_compressed(tmp_path: Path) -> None:
    path = tmp_path / "access_log.log"
    with open(path, "wb") as file:
        file.truncate(100 << 20)
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.access("next")
        assert journal.flush(30)
        assert len(lines(path)) == 1
        rolled = [p for p in tmp_path.iterdir() if p.name not in FILES]
        assert all(re.match(r"access_log\.\d\d-[A-Z][a-z]{2}\.log", p.name) for p in rolled)
    # The next server takes up what this one had no time for.
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.access("wakes the thread")
        while not list(tmp_path.glob("access_log.*.log.gz")):
            assert journal.flush(30)
    (packed,) = tmp_path.glob("access_log.*.log.gz")
    with gzip.open(packed) as file:
        assert file.seek(0, os.SEEK_END) == 100 << 20


def test_a_full_disk_costs_lines_and_a_notice_but_no_half_lines(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the disk, in a process of its own."""
    program = textwrap.dedent(
        """
        import resource, sys
        from mmserve.config.settings import Settings
        from mmserve.logs import journal as j

        j.BACKLOG_BYTES = 200_000
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_010, hard))
        folder = sys.argv[1]
        asked = Settings(log_location=folder, metrics_location=folder)
        with j.open_journal(asked) as journal:
            for number in range(500):
                journal.access(f"line {number:06d} end")
            assert not journal.flush(5)  # in vain: the disk is full
            for number in range(500, 20_000):
                journal.access(f"line {number:06d} end")
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert journal.flush(5)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cannot write") == 1
    assert "File too large" in done.stdout
    assert "can be written again" in done.stdout
    kept, missing = [], 0
    for line in lines(tmp_path / "access_log.log"):
        assert re.match(f"{ISO} - ", line)
        text = line.partition(" - ")[2]
        if notice := re.fullmatch(r"(\d+) lines are missing here: File too large", text):
            missing += int(notice[1])
        else:
            assert re.fullmatch(r"line \d{6} end", text)
            kept.append(int(text[5:11]))
    assert kept == sorted(kept)
    assert kept[:500] == list(range(500))
    assert missing > 0
    assert len(kept) + missing == 20_000


def test_a_pipe_that_nobody_reads_does_not_stop_the_files(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        with open_journal(settings(tmp_path, log_to="both"), stdout=writing) as journal:
            for number in range(3000):
                journal.access(f"{number} " + "x" * 60)
        assert len(lines(tmp_path / "access_log.log")) == 3000
    finally:
        os.close(reading)  # the thread that hangs in write ends
        os.close(writing)


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open_journal(settings(tmp_path, log_to="both"), stdout=writing) as journal:
        for _ in range(3):
            say_everything(journal)
            assert journal.flush()
    os.close(writing)
    assert len(lines(tmp_path / "access_log.log")) == 3
    assert "cannot write" not in (tmp_path / "mms_log.log").read_text()


def test_a_closed_standard_output_is_no_error(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with open_journal(settings(tmp_path), stdout=writing) as journal:
        say_everything(journal)
    assert len(lines(tmp_path / "mms_log.log")) == 3


def test_a_very_long_text_is_cut(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.server(logging.INFO, "mmserve.x", "y" * 10_000_000)
    assert (tmp_path / "mms_log.log").stat().st_size < 100_000


# logging


def logged(folder: Path) -> str:
    return (folder / "mms_log.log").read_text()


def test_records_become_lines_with_their_extra_fields(tmp_path: Path) -> None:
    log = logging.getLogger("mmserve.models.registry")
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.install_logging()
        log.info("worker %s", "ready", extra={"model": "a b", "pid": 7, "load_s": 1.80000001})
        log.debug("hidden")
    assert re.fullmatch(
        rf'{ISO} \[INFO \] main mmserve\.models\.registry - worker ready model="a b" pid=7 '
        r"load_s=1\.8\n",
        logged(tmp_path),
    )


def test_a_traceback_is_logged_for_errors_only(tmp_path: Path) -> None:
    log = logging.getLogger("mmserve.x")
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.install_logging()
        try:
            raise ValueError("odd\nvalue")
        except ValueError:
            log.warning("mild", exc_info=True)
            log.exception("bad", extra={"model": "m"})
    text = logged(tmp_path)
    assert text.count("Traceback") == 1
    assert " - mild: ValueError: odd\\nvalue\n" in text
    assert " - bad model=m\n\tTraceback (most recent call last):\n\t  File" in text
    assert all(line[:1] in ("2", "\t") for line in text.splitlines())


def test_a_log_call_that_is_wrong_is_told_of(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.install_logging()
        logging.getLogger("mmserve.x").info("%d things", "three")
    assert "test_journal.py" in logged(tmp_path)
    assert "cannot be logged: TypeError" in logged(tmp_path)


def test_warnings_are_logged(tmp_path: Path) -> None:
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.install_logging()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(True)
            warnings.warn("old way", DeprecationWarning, stacklevel=1)
    assert re.search(
        r"\[WARN \] main py\.warnings - .*DeprecationWarning: old way", logged(tmp_path)
    )


def test_logging_is_as_before_once_the_journal_is_closed(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with open_journal(settings(tmp_path), stdout=None) as journal:
        journal.install_logging()
        assert len(root.handlers) == 1
    assert (root.handlers[:], root.level) == before
