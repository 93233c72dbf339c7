"""Ends that come in the very moment when something else does."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mmserve.errors import WorkersFailed
from mmserve.wire.control import Start
from mmserve.wire.framing import encode
from mmserve.wire.messages import Load, Loaded
from mmserve.workers.exits import Exit
from mmserve.workers.pool import Policy
from mmserve.workers.worker import Worker
from mmserve.workers.zygote import Link, Process, Zygote
from tests.workers.house import Write, descriptors, open_house, run, until

ORDER = Load("m", "/", "service:handle", 1, None, "", True, 1 << 20)


@pytest.mark.parametrize("is_reaped_first", [False, True])
def test_a_worker_that_dies_with_its_load_just_done_tells_how_it_died(
    is_reaped_first: bool,
) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with Zygote((), os.environ).running() as zygote:
            ours, theirs = socket.socketpair()
            process = Process(0, loop.create_future())
            worker = Worker(zygote, "m", 1, "9000-x", None)
            await worker.attach(process, ours)
            loading = asyncio.create_task(worker.load(ORDER, 10))
            await asyncio.sleep(0)
            theirs.recv(1 << 16)
            theirs.sendall(b"".join(encode(Loaded(0.1, []))))
            theirs.close()
            if is_reaped_first:
                process.exited.set_result(Exit(-signal.SIGKILL))
            else:
                loop.call_later(0, process.exited.set_result, Exit(-signal.SIGKILL))
            try:
                await loading
            except WorkersFailed as failed:
                assert "killed by signal 9" in failed.cause
            await worker.ended

    run(test())


def test_a_worker_whose_wire_cannot_be_watched_is_ended_all_the_same() -> None:
    async def test() -> None:
        async with Zygote((), os.environ).running() as zygote:
            process = Process(0, asyncio.get_running_loop().create_future())
            worker = Worker(zygote, "m", 1, "9000-x", None)
            ours, theirs = socket.socketpair()
            ours.close()
            theirs.close()
            with pytest.raises((OSError, ValueError)):
                await worker.attach(process, ours)
            process.exited.set_result(Exit(-signal.SIGKILL))
            async with asyncio.timeout(5):
                await worker.stop(grace_s=0)

    run(test())


def test_a_worker_that_dies_before_it_reads_is_paced_and_given_up(write: Write) -> None:
    """What it was sent is given back each time: nothing else would end the restarts."""
    setup = """
        import mmserve.wire.channel
        mmserve.wire.channel.Channel.recv = lambda self: os._exit(7)
    """

    async def test() -> None:
        async with open_house() as house:
            directory = write("return ''", load="open('loads', 'a').write('x')", setup=setup)
            model = house.model(directory, policy=Policy(max_restarts=1))
            waiting = model.ask()
            model.pool.grow(1)
            await until(lambda: model.given_up is not None)
            assert (directory / "loads").read_text() == "xx"
            assert not waiting.done()

    run(test())


def test_a_successor_that_does_not_load_is_not_tried_again_at_once(
    write: Write,
) -> None:
    load = """
        open('loads', 'a').write('x')
        if os.path.getsize('loads') > 1:
            while not os.path.exists('go'): time.sleep(0.01)
            raise ValueError('no more of them')
    """

    async def test() -> None:
        async with open_house() as house:
            directory = write("return str(os.getpid())", load=load)
            model = house.model(directory, policy=Policy(max_requests=1))
            (slot,) = await model.start()
            pid = await model.answer()
            await until(lambda: slot.successor is not None)
            assert await model.answer() == pid  # meanwhile it has served enough, again
            (directory / "go").touch()
            await until(lambda: slot.successor is None)
            for _ in range(20):
                assert await model.answer() == pid
            assert (directory / "loads").read_text() == "xx"

    run(test())


def test_an_order_that_cannot_be_kept_leaves_no_descriptor() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        link = Link(ours, lambda _: None, lambda: None)
        link.post(Start(0, "fork", {b"BIG": bytes(8 << 20)}))  # more than the socket takes
        before = descriptors()
        free = [os.dup(0) for _ in range(3)]
        for fd in free:
            os.close(fd)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[2], hard))  # room for two of three
        try:
            with pytest.raises(OSError, match="Too many open files"):
                link.post(Start(0, "fork", {}), (0, 1, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert descriptors() == before
        link.close()
        theirs.close()

    run(test())


def test_a_server_started_without_standard_streams_mixes_nothing_up(tmp_path: Path) -> None:
    """Some supervisors close them: the next files would be 0, 1 and 2, and prints go into them."""
    code = (
        "import os, sys\n"
        "from mmserve import platform\n"
        "platform.open_standard_streams()\n"
        f"fd = os.open({str(tmp_path / 'log')!r}, os.O_CREAT | os.O_RDWR)\n"
        "assert fd > 2\n"
        "os.system('echo lost')\n"
        "sys.exit(os.fstat(fd).st_size)\n"
    )
    closed = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code])
    assert closed.returncode == 0


def test_a_process_that_is_armed_after_its_owners_end_does_not_live(tmp_path: Path) -> None:
    armed = (
        "import os, sys, time\n"
        "from mmserve import platform\n"
        "os.setsid()\n"
        "read, write = os.pipe()\n"
        "os.close(write)\n"
        "platform.kill_group_when_closed(read)\n"
        "print('alive', flush=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", armed], capture_output=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"")
