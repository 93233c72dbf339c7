"""Worker processes: how they start, serve, end, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmserve import platform
from mmserve.errors import (
    ModelGone,
    PredictionFailed,
    QueueFull,
    ServeError,
    WaitedTooLong,
    WorkerDied,
    WorkersFailed,
)
from mmserve.workers.pool import Policy
from tests.workers.house import Write, descriptors, is_alive, open_house, run, until

PID = "return str(os.getpid())"
PID_OR_SLEEP = """
    if body.startswith('sleep'):
        print('begun')
        time.sleep(float(body.split()[1]))
    return str(os.getpid())
"""


def test_a_worker_answers_and_leaves_nothing_behind(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID))
            await model.start()
            pid = int(await model.answer())
            assert is_alive(pid)
            await model.close()
            assert not is_alive(pid)
            zygote = house.zygote.pid
        assert not is_alive(zygote)

    run(test())


def test_a_killed_worker_costs_the_batch_it_had_and_is_replaced(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID_OR_SLEEP))
            await model.start()
            pid = int(await model.answer())
            running, queued = model.ask("sleep 30"), model.ask("x")
            await until(lambda: "begun" in house.lines)
            os.kill(pid, signal.SIGKILL)

            died = await running
            assert isinstance(died, WorkerDied)
            assert str(died).startswith("Worker died.")
            assert "killed by signal 9 (SIGKILL), probably out of memory" in str(died)
            assert not isinstance(await queued, WorkerDied)
            assert int(await model.answer()) != pid

    run(test())


@pytest.mark.parametrize(
    ("crash", "cause"),
    [
        ("ctypes.string_at(0)", "signal 11"),
        ("os.abort()", "signal 6"),
        ("os._exit(0)", "status 0"),
        ("sys.exit(3)", "status 3"),
        ("raise KeyboardInterrupt", "status 1"),
        ("os.closerange(3, 1000); time.sleep(60)", "closed its connection"),
    ],
)
def test_a_crash_is_told_exactly(write: Write, crash: str, cause: str) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(f"if body == 'crash':\n    {crash}\nreturn 'fine'"))
            await model.start()
            died = await model.ask("crash")
            assert isinstance(died, WorkerDied)
            assert cause in str(died)
            assert await model.answer() == "fine"

    run(test())


def test_a_worker_that_dies_gives_back_what_it_had_in_advance(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID_OR_SLEEP))
            await model.start()
            pid = int(await model.answer())  # quick: from now on it gets a batch in advance
            running, ahead = model.ask("sleep 30"), model.ask("x")
            await until(lambda: "begun" in house.lines)
            os.kill(pid, signal.SIGKILL)
            assert isinstance(await running, WorkerDied)
            answer = await ahead
            assert not isinstance(answer, ServeError)
            assert int(bytes(answer.body)) != pid

    run(test())


def test_a_request_that_no_worker_has_begun_survives_the_death_of_its_worker(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID))
            await model.start()
            pid = int(await model.answer())
            os.kill(pid, signal.SIGSTOP)
            asked = model.ask()
            os.kill(pid, signal.SIGKILL)
            answer = await asked
            assert not isinstance(answer, ServeError)
            assert int(bytes(answer.body)) != pid

    run(test())


def test_a_worker_that_talks_nonsense_is_replaced(write: Write) -> None:
    predict = """
        if body == 'garble':
            for fd in range(3, 64):
                try:
                    if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, b'nonsense' * 4)
                except OSError:
                    pass
            time.sleep(60)
        return str(os.getpid())
    """

    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(predict, setup="import stat"))
            await model.start()
            pid = int(await model.answer())
            garbled, waiting = model.ask("garble"), model.ask()
            died = await garbled
            assert isinstance(died, WorkerDied)
            assert "makes no sense" in str(died)
            assert not isinstance(await waiting, ServeError)
            assert int(await model.answer()) != pid

    run(test())


def test_a_server_without_descriptors_says_so_and_recovers(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID))
            await model.start()
            before = descriptors()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            for spare in range(5):  # none for a socket pair, for the first pipe, the second …
                other = house.model(write(PID))
                resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + spare, hard))
                try:
                    with pytest.raises(WorkersFailed, match="Too many open files"):
                        await other.start()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await other.close()
                assert descriptors() == before
            assert await model.answer()

    run(test())


@pytest.mark.parametrize("preload", [False, True])
def test_a_large_environment_reaches_many_workers_at_once(write: Write, preload: bool) -> None:
    async def test() -> None:
        async with open_house("colorsys") as house:
            await house.zygote.library.settled.wait()
            environ = {f"BIG_{n}": str(n) * 100_000 for n in range(10)} | dict(os.environ)
            model = house.model(
                write("return str(len(os.environ['BIG_7']))"), environ=environ, preload=preload
            )
            await model.start(6)
            assert {await model.answer() for _ in range(6)} == {"100000"}

    run(test())


def kinds_of_descriptors(pid: int | None) -> list[str]:
    """What a process has open: files by name, "pipe", "socket"."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return sorted(str(link.readlink()).partition(":")[0] for link in links)


@pytest.mark.parametrize("imports", [(), ("colorsys",)])
def test_no_worker_holds_what_is_another_ones(write: Write, imports: tuple[str, ...]) -> None:
    """Else the end of that one's wire would not be seen. Orders come in pieces, and together."""

    async def test() -> None:
        async with open_house(*imports) as house:
            await house.zygote.library.settled.wait()
            environ = {f"BIG_{n}": str(n) * 100_000 for n in range(10)} | dict(os.environ)
            model = house.model(write(PID), environ=environ)
            held = []
            for _ in range(3):
                for slot in await model.start(6):
                    assert slot.worker is not None
                    held.append(kinds_of_descriptors(slot.worker.pid))
            assert held == [held[0]] * len(held)
            assert held[0].count("socket") == 1

    run(test())


def test_workers_live_on_when_the_zygote_dies(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID_OR_SLEEP))
            await model.start()
            pid, zygote = int(await model.answer()), house.zygote.pid
            running = model.ask("sleep 0.3")
            os.kill(zygote, signal.SIGKILL)
            answer = await running
            assert not isinstance(answer, WorkerDied)

            # A new zygote starts workers, and the end of an adopted one is still noticed.
            await model.start(1)
            assert house.zygote.pid != zygote
            os.kill(pid, signal.SIGKILL)
            how = await model.gone.get()
            assert how.code == -signal.SIGKILL
            await until(lambda: not Path(f"/proc/{pid}").exists())
            assert await model.answer()

    run(test())


SPINNING = """
    subprocess.Popen([sys.executable, '-c',
        'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])
    open('started', 'w').write(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)  # holds the GIL
    return ''
"""

FRONT = """
import asyncio, sys
from pathlib import Path
from tests.workers.house import open_house

async def main():
    start = sys.argv[2]
    async with open_house(worker_start="fresh" if start == "fresh" else "fork") as house:
        model = house.model(Path(sys.argv[1]), preload=start == "template")
        await model.start()
        running = model.ask()
        print(house.zygote.pid, flush=True)
        await running

asyncio.run(main())
"""


@pytest.mark.parametrize("start", ["fork", "fresh", "template"])
@pytest.mark.parametrize("with_zygote", [False, True])
def test_nothing_outlives_a_killed_front(write: Write, with_zygote: bool, start: str) -> None:
    directory = write(SPINNING)
    root = str(Path(__file__).parents[2])
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, str(directory), start],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert front.stdout is not None

    async def test() -> None:
        assert front.stdout is not None
        zygote = int(front.stdout.readline())
        await until(
            lambda: (directory / "started").exists() and (directory / "started").stat().st_size > 0
        )
        worker = int((directory / "started").read_text())
        await until(lambda: len(platform.descendants(worker)) == 1)
        family = [front.pid, zygote, worker, *platform.descendants(worker)]
        family += [pid for pid in platform.descendants(zygote) if pid not in family]
        assert len(family) == (5 if start == "template" else 4)
        for pid in family[: 2 if with_zygote else 1]:
            os.kill(pid, signal.SIGKILL)
        front.wait()
        await until(lambda: not any(map(is_alive, family)), limit_s=5)

    with front:
        run(test())


def test_what_a_handler_left_running_goes_with_its_worker(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(
                write("return str(subprocess.Popen(['sleep', '600']).pid)"),
            )
            await model.start()
            child = int(await model.answer())
            assert is_alive(child)
            await model.close()
            await until(lambda: not is_alive(child))

    run(test())


def test_a_load_that_fails_says_why(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID, load="raise ValueError('no weights')"))
            with pytest.raises(WorkersFailed, match="ValueError: no weights") as failed:
                await model.start()
            assert not failed.value.out_of_memory

            model = house.model(write(PID, name="big", load="raise MemoryError"))
            with pytest.raises(WorkersFailed) as failed:
                await model.start()
            assert failed.value.out_of_memory

            model = house.model(write(PID, name="killed", load="os.kill(os.getpid(), 9)"))
            with pytest.raises(WorkersFailed, match="killed by signal 9") as failed:
                await model.start()
            assert failed.value.out_of_memory

    run(test())


def test_a_load_has_a_limit_of_its_own(write: Write) -> None:
    async def test() -> None:
        async with open_house(load_timeout_s=0.3) as house:
            model = house.model(write(PID, load="time.sleep(60)"))
            with pytest.raises(WorkersFailed, match="load_timeout_seconds"):
                await model.start()

    run(test())


def test_a_prediction_that_takes_too_long_costs_its_worker(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID_OR_SLEEP), response_timeout_s=0.5)
            await model.start()
            pid = int(await model.answer())
            died = await model.ask("sleep 60")
            assert isinstance(died, WorkerDied)
            assert "default_response_timeout_seconds" in str(died)
            assert int(await model.answer()) != pid

    run(test())


def test_workers_that_keep_failing_are_given_up_at_the_limit(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            directory = write(PID, load="raise ValueError('broken')")
            model = house.model(directory, policy=Policy(max_restarts=0))
            with pytest.raises(WorkersFailed):
                await model.start()
            await model.gone.get()
            assert model.given_up is not None
            assert "broken" in model.given_up.cause

    run(test())


def test_a_worker_is_recycled_without_losing_a_request(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID), policy=Policy(max_requests=5))
            await model.start()
            pids = [await model.answer()]
            while len(set(pids)) < 4:  # never a failure on the way
                pids.append(await model.answer())
            await until(lambda: sum(is_alive(int(pid)) for pid in set(pids)) <= 2)

    run(test())


def test_a_worker_above_its_memory_limit_is_replaced(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            grow = "KEPT.append(bytearray(os.urandom(1)) * (20 << 20)); return str(os.getpid())"
            directory = write(grow, setup="KEPT = []")
            model = house.model(directory, policy=Policy(memory_limit=60 << 20))
            await model.start()
            first = await model.answer()
            # It tells its memory once a second at most, and after so many batches at the latest.
            for _ in range(60):
                if await model.answer() != first:
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("it was never replaced")

    run(test())


# Queues


def test_a_full_queue_refuses_at_once_and_a_removed_model_answers_what_waits(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID_OR_SLEEP), capacity=2)
            await model.start()
            running = model.ask("sleep 0.5")
            waiting = [model.ask("x") for _ in range(2)]
            with pytest.raises(QueueFull):
                model.ask("x")
            closing = asyncio.create_task(model.close())
            assert all([isinstance(await one, ModelGone) for one in waiting])
            assert not isinstance(await running, WorkerDied)
            await closing

    run(test())


def test_a_batch_that_fails_fails_for_each_of_its_requests(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            predict = "if body == 'bad':\n    raise ValueError('bad')\nreturn body"
            model = house.model(write(predict), batch_size=3, delay_s=5)
            await model.start()
            outcomes = [await one for one in [model.ask(word) for word in ("a", "bad", "c")]]
            assert all(isinstance(one, PredictionFailed) for one in outcomes)
            assert [await one for one in [model.ask(word) for word in "abc"]]

    run(test())


def test_a_request_waits_no_longer_than_it_may(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID_OR_SLEEP))
            model.dispatcher._batcher.max_wait_s = 0.2
            await model.start()
            running, waiting = model.ask("sleep 0.6"), model.ask("x")
            assert isinstance(await waiting, WaitedTooLong)
            assert not isinstance(await running, WorkerDied)

    run(test())


def test_scaling_down_lets_the_running_request_finish(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID_OR_SLEEP))
            await model.start(2)
            running = [model.ask("sleep 0.4"), model.ask("sleep 0.4")]
            await model.pool.leave(model.pool.pick_leaving(2), timeout_s=10)
            assert all([not isinstance(await one, WorkerDied) for one in running])
            assert model.pool.slots == []

    run(test())


def test_ten_thousand_quick_requests_keep_their_answers(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write("return body"), capacity=10_000)
            await model.start(2)
            outcomes = [model.ask(str(n)) for n in range(5_000)]
            bodies = [bytes((await one).body).decode() for one in outcomes]  # type: ignore[union-attr]
            assert bodies == [str(n) for n in range(5_000)]

    run(test())


def test_descriptors_and_zombies_do_not_pile_up(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            directory = write(PID, load="subprocess.Popen(['sh', '-c', 'sleep 0.1 &'])")

            async def cycle() -> None:
                model = house.model(directory)
                await model.start()
                await model.close()

            def held() -> int:
                pids = ("self", str(house.zygote.pid))
                return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)

            await cycle()
            before = held()
            for _ in range(20):
                await cycle()
            assert held() <= before + 2
            await until(lambda: platform.children(house.zygote.pid) == [])

    run(test())


# Ways to start


def test_libraries_are_imported_once_and_shared(write: Write) -> None:
    async def test() -> None:
        async with open_house("colorsys", "no_such_module") as house:
            await house.zygote.library.settled.wait()
            model = house.model(write("return str('colorsys' in sys.modules)"))
            (slot,) = await model.start()
            assert await model.answer() == "True"
            assert slot.worker is not None
            assert slot.worker.start == "fork"

    run(test())


def test_an_import_that_starts_a_thread_is_left_out(write: Write, tmp_path: Path) -> None:
    name = "mmserve_test_threaded"
    site = Path(next(path for path in sys.path if path.endswith("site-packages")))
    threaded = site / f"{name}.py"
    threaded.write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )

    async def test() -> None:
        async with open_house(name, "colorsys") as house:
            await house.zygote.library.settled.wait()
            model = house.model(
                write(f"return str(['colorsys' in sys.modules, {name!r} in sys.modules])")
            )
            await model.start()
            assert await model.answer() == "[True, False]"

    try:
        run(test())
    finally:
        threaded.unlink()


def test_workers_do_not_end_as_the_library_would(write: Write, tmp_path: Path) -> None:
    done, kept = tmp_path / "done", tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "imported.py").write_text(
        "import sys, weakref\n"
        "class Thing: pass\n"
        "sys.thing = Thing()\n"
        f"weakref.finalize(sys.thing, open, {str(done)!r}, 'a')\n"
    )

    async def test() -> None:
        async with open_house(f"runpy:run_path({tmp_path / 'imported.py'})") as house:
            await house.zygote.library.settled.wait()
            model = house.model(
                write(
                    "return str(hasattr(sys, 'thing'))",
                    setup=f"import tempfile; OWN = tempfile.TemporaryDirectory(dir={str(kept)!r})",
                )
            )
            await model.start()
            assert await model.answer() == "True"
            assert list(kept.iterdir())
            await model.close()
            assert not done.exists()
            assert not list(kept.iterdir())  # what the model's own code wants done, is

    run(test())


def test_an_archives_own_module_wins_over_a_preloaded_one(write: Write) -> None:
    async def test() -> None:
        async with open_house("colorsys") as house:
            await house.zygote.library.settled.wait()
            directory = write("import colorsys\n    return colorsys.WHOSE".replace("    ", ""))
            (directory / "colorsys.py").write_text("WHOSE = 'the archive'\n")
            model = house.model(directory, top_names=["service", "colorsys"])
            (slot,) = await model.start()
            assert await model.answer() == "the archive"
            assert slot.worker is not None
            assert slot.worker.start == "fresh"
            assert "colorsys" in slot.worker.start_reason

    run(test())


def test_a_fresh_worker_serves_and_dies_like_a_forked_one(write: Write) -> None:
    async def test() -> None:
        async with open_house(worker_start="fresh") as house:
            model = house.model(write(PID_OR_SLEEP))
            await model.start()
            pid = int(await model.answer())
            running = model.ask("sleep 30")
            await until(lambda: "begun" in house.lines)
            os.kill(pid, signal.SIGKILL)
            assert isinstance(await running, WorkerDied)
            assert int(await model.answer()) != pid

    run(test())


def test_a_preloaded_model_is_loaded_once_and_forked(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            load = "open('loads', 'a').write('x')"
            directory = write(
                "return f'{os.getpid()} {LOADED_BY}'", load=load, setup="LOADED_BY = os.getpid()"
            )
            model = house.model(directory, preload=True)
            slots = await model.start(3)
            assert (directory / "loads").read_text() == "x"
            pid, loaded_by = (await model.answer()).split()
            assert pid != loaded_by
            assert [slot.worker.start for slot in slots if slot.worker] == ["template"] * 3

            os.kill(int(pid), signal.SIGKILL)
            await model.ready.get()
            assert (directory / "loads").read_text() == "x"
            await model.close()
            assert not is_alive(int(loaded_by))

    run(test())


def test_a_preloaded_model_with_threads_is_not_forked(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            load = "open('loads', 'a').write('x')"
            setup = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
            directory = write(PID, load=load, setup=setup)
            model = house.model(directory, preload=True)
            slots = await model.start(2)
            assert (directory / "loads").read_text() == "xx"
            assert len({slot.worker.pid for slot in slots if slot.worker}) == 2
            assert any("thread" in slot.worker.start_reason for slot in slots if slot.worker)
            assert await model.answer()

    run(test())


def test_a_preloaded_model_that_cannot_load_fails_the_start(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID, load="raise ValueError('no')"), preload=True)
            with pytest.raises(WorkersFailed, match="ValueError: no"):
                await model.start()

    run(test())


def test_what_workers_print_is_heard(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write("print('hello', body); return ''"))
            await model.start()
            await model.answer("there")
            await until(lambda: "hello there" in house.lines)

    run(test())


def test_no_more_processes_start_than_the_limit_says(write: Write) -> None:
    async def test() -> None:
        async with open_house(max_processes=1) as house:
            model = house.model(write(PID))
            await model.start()
            other = house.model(write(PID, name="other"))
            with pytest.raises(WorkersFailed, match="max_worker_processes") as refused:
                await other.start()
            assert refused.value.out_of_memory
            await model.close()
            again = house.model(write(PID, name="again"))
            await again.start()

    run(test())


def test_a_load_that_keeps_failing_is_traced_once(write: Write) -> None:
    async def test() -> None:
        async with open_house() as house:
            model = house.model(write(PID, load="raise ValueError('no weights')"))
            with pytest.raises(WorkersFailed):
                await model.start()
            (slot,) = model.pool.slots
            first = slot.worker
            await until(lambda: slot.worker is not first and slot.is_alive, limit_s=15)
            await until(lambda: not slot.is_alive, limit_s=15)
            assert house.lines.count("ValueError: no weights") == 1
            assert any("raise ValueError" in line for line in house.lines)

    run(test())


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_fork_has_as_many_threads_as_a_fresh_interpreter_would(write: Write) -> None:
    async def test() -> None:
        async with open_house("torch") as house:
            await house.zygote.library.settled.wait()
            directory = write(
                "return str(torch.get_num_threads())",
                load="torch.zeros(1) + 1",
                setup="import torch",
            )
            for preload, start in ((False, "fork"), (True, "template")):
                for wanted in ("3", "2,1", ""):
                    environ = dict(os.environ) | {"OMP_NUM_THREADS": wanted}
                    if not wanted:
                        del environ["OMP_NUM_THREADS"]
                    model = house.model(directory, preload=preload, environ=environ)
                    (slot,) = await model.start()
                    assert slot.worker is not None
                    assert slot.worker.start == start
                    assert await model.answer() == (wanted or "1")[0]
                    await model.close()

    run(test())


@pytest.mark.skipif(find_spec("numpy") is None, reason="needs numpy")
@pytest.mark.parametrize("preload", [False, True])
def test_no_two_workers_draw_the_same_random_numbers(write: Write, preload: bool) -> None:
    async def test() -> None:
        async with open_house("numpy.random") as house:
            await house.zygote.library.settled.wait()
            draw = "time.sleep(0.3); return f'{os.getpid()} {numpy.random.random()}'"
            directory = write(draw, setup="import numpy.random")
            model = house.model(directory, preload=preload)
            await model.start(3)
            drawn = [await one for one in [model.ask() for _ in range(3)]]
            told = [bytes(one.body).decode().split() for one in drawn]  # type: ignore[union-attr]
            assert len({pid for pid, _ in told}) == len({number for _, number in told}) == 3

    run(test())


def test_nobody_waits_for_a_library_that_cannot_be_started_again(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with open_house("colorsys") as house:
            await house.zygote.library.settled.wait()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() - 1, hard))
            try:
                os.kill(house.zygote.library.pid, signal.SIGKILL)
                await until(lambda: "library process did not start" in caplog.text)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            model = house.model(write(PID))
            await model.start()

    run(test())


def test_a_library_that_does_not_come_up_holds_no_model_for_ever(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")

    async def test() -> None:
        imports = f"runpy:run_path({tmp_path / 'hangs.py'})"
        async with open_house(imports, load_timeout_s=2) as house:
            model = house.model(write(PID))
            (slot,) = await model.start()
            assert slot.worker is not None
            assert (slot.worker.start, "in time" in slot.worker.start_reason) == ("fork", True)
            assert await model.answer()

    run(test())


@pytest.mark.parametrize("start", ["fork", "fresh", "template"])
def test_a_variable_that_is_no_utf_8_reaches_the_handler(write: Write, start: str) -> None:
    async def test() -> None:
        async with open_house(
            "colorsys", worker_start="fresh" if start == "fresh" else "fork"
        ) as house:
            await house.zygote.library.settled.wait()
            environ = dict(os.environ) | {"ODD": os.fsdecode(b"caf\xe9")}
            directory = write("return str(os.environb[b'ODD'])")
            model = house.model(directory, environ=environ, preload=start == "template")
            await model.start()
            assert await model.answer() == str(b"caf\xe9")

    run(test())


@pytest.mark.parametrize("preload", [False, True])
def test_a_start_that_breaks_inside_fails_and_is_not_waited_for(
    write: Write, preload: bool
) -> None:
    async def test() -> None:
        async with open_house() as house:
            # An order that cannot be written, where it is built.
            model = house.model(write(PID), model_dir=os.fsdecode(b"/caf\xe9"), preload=preload)
            with pytest.raises(WorkersFailed, match="internal error"):
                await model.start()

    run(test())
