"""Real pipes of real processes, on both event loops."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import uvloop

from mmserve.logs.output import OutputLine, OutputReader
from mmserve.logs.pump import OutputPump

Run = Callable[[Coroutine[object, object, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run_in_loop(work: Coroutine[object, object, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(work)

    return run_in_loop


class Listener:
    """Gathers the lines of one pipe."""

    def __init__(self, fd: int) -> None:
        self.lines: list[OutputLine] = []
        self.calls = 0
        self.ended = asyncio.Event()
        self.arrived = asyncio.Event()
        self.ends = 0
        self.pump = OutputPump(asyncio.get_running_loop(), fd, self._on_lines, on_end=self._on_end)

    def _on_lines(self, lines: list[OutputLine]) -> None:
        assert lines
        self.lines += lines
        self.arrived.set()

    def _on_end(self) -> None:
        self.ends += 1
        self.ended.set()

    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def dropped(self) -> int:
        found = (re.match(r"… (\d+) lines", text) for text in self.texts())
        return sum(int(notice[1]) for notice in found if notice)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def printing(program: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A Python process, and where its standard output and error can be read."""
    pipes = [os.pipe(), os.pipe()]
    (_, out), (_, err) = pipes
    child = subprocess.Popen([sys.executable, "-I", "-c", program], stdout=out, stderr=err)
    os.close(out)
    os.close(err)
    return child, [reading for reading, _ in pipes]


def test_a_child_that_prints_megabytes_is_not_held_up(run: Run) -> None:
    async def scene() -> None:
        program = (
            "import os, sys\n"
            "sys.stdout.write('x\\n' * (5 << 19)); sys.stdout.flush()\n"
            "sys.stderr.write('x\\n' * (5 << 19)); sys.stderr.flush()\n"
            "os.write(1, b'y' * (1 << 20))\n"
        )
        child, reading = printing(program)
        out, err = (Listener(fd) for fd in reading)
        await out.ended.wait()
        await err.ended.wait()
        assert child.wait(10) == 0
        assert out.ends == err.ends == 1
        for listener, extra in ((out, 1), (err, 0)):
            notices = sum(text.startswith("…") for text in listener.texts())
            shown = len(listener.lines) - notices
            assert shown + listener.dropped() == (5 << 19) + extra
            assert shown < 100_000

    run(scene())


def test_lines_arrive_while_the_worker_lives(run: Run) -> None:
    async def scene() -> None:
        reading, writing = os.pipe()
        listener = Listener(reading)
        os.write(writing, b"first\nsec")
        await listener.arrived.wait()
        assert listener.texts() == ["first"]
        os.write(writing, b"ond\nlast")
        os.close(writing)
        await listener.ended.wait()
        assert listener.texts() == ["first", "second", "last"]
        assert not listener.pump.is_open

    run(scene())


def test_the_notice_comes_though_nothing_else_does(run: Run) -> None:
    async def scene() -> None:
        reading, writing = os.pipe()
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def look(lines: list[OutputLine]) -> None:
            for line in lines:
                if line.text.startswith("… 8 lines"):
                    found.set_result(line.text)

        reader = OutputReader(burst_lines=2)
        pump = OutputPump(asyncio.get_running_loop(), reading, look, reader=reader)
        os.write(writing, b"x\n" * 10)
        await found
        pump.close()
        os.close(writing)

    run(scene())


def test_closing_reads_what_is_there_though_a_stranger_holds_the_pipe(run: Run) -> None:
    async def scene() -> None:
        before = open_descriptors()
        reading, writing = os.pipe()
        listener = Listener(reading)
        os.write(writing, b"last words")
        listener.pump.close()
        listener.pump.close()
        assert listener.texts() == ["last words"]
        assert listener.ends == 1
        os.close(writing)
        assert open_descriptors() == before

    run(scene())


def test_closing_during_a_rest_leaves_nothing_behind(run: Run) -> None:
    async def scene() -> None:
        program = "import os\nwhile True: os.write(1, b'z' * 65536)"
        child, reading = printing(program)
        out, err = (Listener(fd) for fd in reading)
        await out.arrived.wait()
        out.pump.close()
        assert child.wait(10) != 0  # nobody reads any more
        assert out.ends == 1
        await err.ended.wait()
        assert "BrokenPipeError: [Errno 32] Broken pipe" in err.texts()

    run(scene())


def test_descriptors_do_not_pile_up(run: Run) -> None:
    async def scene() -> None:
        before = open_descriptors()
        for number in range(300):
            reading, writing = os.pipe()
            listener = Listener(reading)
            os.write(writing, b"hello\n")
            os.close(writing)
            if number % 2:
                await listener.ended.wait()
            else:
                listener.pump.close()
            assert listener.texts() == ["hello"]
        assert open_descriptors() == before

    run(scene())
