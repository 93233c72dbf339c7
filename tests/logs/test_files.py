"""Real files; the time of day is told."""

import contextlib
import gzip
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmserve.logs.files import LogFile

DAY_S = 86_400
# Noon: a day later is another day, whatever the time zone and the season.
NOON = time.mktime((2026, 3, 28, 12, 0, 0, 0, 0, -1))


@contextlib.contextmanager
def opened(path: Path, now: float = NOON, **options: int) -> Iterator[LogFile]:
    file = LogFile(path, **options)
    file.open(now)
    try:
        yield file
    finally:
        file.close()


def say(file: LogFile, text: str, now: float = NOON) -> None:
    data = text.encode()
    file.prepare(now, len(data))
    assert file.write(memoryview(data)) == len(data)


def finish(file: LogFile) -> None:
    while file.work():
        pass


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "a.log"
    for text in ("one\n", "two\n"):
        with opened(path, now=time.time()) as file:
            say(file, text, now=time.time())
    assert path.read_text() == "one\ntwo\n"


def test_a_new_day_begins_a_new_file(tmp_path: Path) -> None:
    with opened(tmp_path / "access_log.log") as file:
        say(file, "today\n")
        say(file, "tomorrow\n", NOON + DAY_S)
        finish(file)
    assert names(tmp_path) == {"access_log.log", "access_log.28-Mar.log.gz"}
    assert gzip.decompress((tmp_path / "access_log.28-Mar.log.gz").read_bytes()) == b"today\n"
    assert (tmp_path / "access_log.log").read_text() == "tomorrow\n"


def test_a_file_of_another_day_is_rolled_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\n")
    os.utime(path, (NOON, NOON))
    with opened(path, now=NOON + 2 * DAY_S) as file:
        say(file, "new\n", NOON + 2 * DAY_S)
        finish(file)
    assert names(tmp_path) == {"a.log", "a.28-Mar.log.gz"}


def test_an_empty_file_is_not_rolled(tmp_path: Path) -> None:
    with opened(tmp_path / "a.log") as file:
        say(file, "first\n", NOON + 5 * DAY_S)
        finish(file)
    assert names(tmp_path) == {"a.log"}


def test_a_full_file_is_rolled_between_lines_and_five_are_kept(tmp_path: Path) -> None:
    with opened(tmp_path / "a.log", roll_bytes=100) as file:
        for number in range(20):
            say(file, f"{number:03d}" + "x" * 60 + "\n")
            finish(file)
    rolled = names(tmp_path) - {"a.log"}
    assert len(rolled) == 5
    assert all(name.endswith(".log.gz") for name in rolled)
    lines = [gzip.decompress((tmp_path / name).read_bytes()) for name in rolled]
    assert {line[:3] for line in lines} == {b"014", b"015", b"016", b"017", b"018"}
    assert all(line.count(b"\n") == 1 for line in lines)


def test_strangers_files_are_left_alone(tmp_path: Path) -> None:
    others = {"a.notes.log", "ab.28-Mar.log.gz", "a.28-Mar.log.txt", "b.log"}
    for name in others:
        (tmp_path / name).write_text("mine")
    with opened(tmp_path / "a.log", roll_bytes=10, keep=1) as file:
        for _ in range(5):
            say(file, "0123456789\n")
            finish(file)
    assert others <= names(tmp_path)


def test_compressing_goes_on_after_a_crash(tmp_path: Path) -> None:
    with opened(tmp_path / "a.log") as file:
        say(file, "today\n")
        say(file, "tomorrow\n", NOON + DAY_S)
        file.work()  # begun, not ended
    assert names(tmp_path) == {"a.log", "a.28-Mar.log"}
    with opened(tmp_path / "a.log") as file:
        finish(file)
    assert names(tmp_path) == {"a.log", "a.28-Mar.log.gz"}


def test_a_file_that_was_moved_away_is_followed_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with opened(path) as file:
        say(file, "one\n")
        path.rename(tmp_path / "a.log.1")
        say(file, "two\n", NOON + 5)
        path.unlink()
        say(file, "three\n", NOON + 10)
    assert (tmp_path / "a.log.1").read_text() == "one\n"
    assert path.read_text() == "three\n"


def test_a_device_is_written_and_never_rolled(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.symlink_to("/dev/null")
    with opened(path, roll_bytes=10) as file:
        for day in range(3):
            say(file, "0123456789\n", NOON + day * DAY_S)
    assert names(tmp_path) == {"a.log"}


def test_a_pipe_without_a_reader_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.log")
    with pytest.raises(OSError, match="No such device"), opened(tmp_path / "a.log"):
        pass


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    with pytest.raises(OSError), opened(tmp_path / "logs" / "a.log"):
        pass


def test_a_disk_too_full_to_compress_keeps_the_plain_file(tmp_path: Path) -> None:
    with opened(tmp_path / "a.log") as file:
        say(file, "".join(os.urandom(30).hex() + "\n" for _ in range(5000)))
        say(file, "tomorrow\n", NOON + DAY_S)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            finish(file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == {"a.log", "a.28-Mar.log"}


def test_descriptors_do_not_pile_up(tmp_path: Path) -> None:
    with opened(tmp_path / "a.log", roll_bytes=10) as file:
        before = open_descriptors()
        for number in range(50):
            say(file, "0123456789\n")
            finish(file)
            if number % 10 == 0:
                file.reopen(NOON)
        assert open_descriptors() == before
