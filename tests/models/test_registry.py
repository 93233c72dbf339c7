"""The registry: registrations, scaling and removals that meet, with real processes below."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from mmserve import platform
from mmserve.errors import (
    ModelExists,
    ModelGone,
    ModelNotFound,
    NoWorker,
    QueueFull,
    ServeError,
    ShuttingDown,
    SourceNotFound,
    UnregisterTimedOut,
    WorkerDied,
    WorkersFailed,
)
from mmserve.models.port import Progress
from mmserve.scheduling.job import Result
from tests.models.hall import Hall, open_hall, remembered
from tests.workers.house import descriptors, is_alive, run, until

Test = Callable[[Hall], Coroutine[Any, Any, None]]
GATE = "while not os.path.exists('gate'): time.sleep(0.005)"


def in_hall(place: Path, test: Test, **options: Any) -> None:
    """Runs a test; whatever it leaves registered must go without a trace."""

    async def whole() -> None:
        async with open_hall(place, **options) as hall:
            await test(hall)
            await hall.empty()

    run(whole())


# Registering


def test_a_model_is_registered_described_asked_and_removed(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        assert await hall.register("m", 2) is Progress.DONE
        described = hall.registry.describe("m")
        assert (described.minWorkers, described.maxWorkers) == (2, 2)
        assert [worker.status for worker in described.workers] == ["READY", "READY"]
        assert await hall.pid("m") in [worker.pid for worker in described.workers]
        assert hall.registry.names() == [("m", "m")]
        assert hall.registry.health() == "Healthy"

        await hall.registry.unregister("m")
        assert not any(is_alive(worker.pid) for worker in described.workers if worker.pid)
        with pytest.raises(ModelNotFound):
            hall.ask("m")

    in_hall(tmp_path, test)


def test_of_two_registrations_of_one_name_one_is_refused(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        answers = await asyncio.gather(
            hall.register("m"), hall.register("m"), return_exceptions=True
        )
        assert sorted(map(type, answers), key=str) == sorted([Progress, ModelExists], key=str)
        assert hall.fetcher.in_use == 1
        assert await hall.pid("m")

    in_hall(tmp_path, test)


def test_a_registration_that_fails_leaves_name_and_processes_free(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="if os.path.exists('bad'): raise ValueError('bad')")
        bad = tmp_path / "m" / "bad"
        bad.touch()
        for _ in range(2):
            with pytest.raises(WorkersFailed, match="ValueError: bad"):
                await hall.register("m", 2)
            await hall.is_empty()
        bad.unlink()
        assert await hall.register("m") is Progress.DONE
        with pytest.raises(SourceNotFound):
            await hall.register("absent")

    in_hall(tmp_path, test)


def test_a_removal_ends_a_registration_that_still_loads(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load=GATE)
        loading = asyncio.create_task(hall.register("m", 2))
        await until(lambda: len(hall.workers()) == 2)
        await hall.registry.unregister("m")
        assert hall.workers() == []
        with pytest.raises(WorkersFailed, match="it was stopped") as failed:
            await loading
        assert not failed.value.out_of_memory
        await hall.is_empty()

    in_hall(tmp_path, test)


def test_a_removal_ends_a_registration_whose_process_is_not_there_yet(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load=GATE)
        for turns in range(12):  # of the event loop, until the process is asked for, born, loading
            loading = asyncio.create_task(hall.register("m", 2))
            while not hall.registry.has("m"):  # noqa: ASYNC110 - turns are the point
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            await hall.registry.unregister("m")
            assert hall.workers() == []
            with pytest.raises(WorkersFailed, match="it was stopped"):
                await loading
            await hall.is_empty()

    in_hall(tmp_path, test)


@pytest.mark.parametrize("preload_model", [False, True])
def test_scaling_to_nothing_ends_a_load_and_keeps_the_model(
    tmp_path: Path, preload_model: bool
) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load=GATE)
        loading = asyncio.create_task(hall.register("m", 2, preload_model=preload_model))
        await until(lambda: len(hall.workers()) == (1 if preload_model else 2))
        assert await hall.scale("m", 0) is Progress.DONE
        assert await loading is Progress.PARTIAL
        await until(lambda: hall.workers() == [])
        with pytest.raises(NoWorker, match="It has no workers"):
            hall.ask("m")

        (tmp_path / "m" / "gate").touch()
        assert await hall.scale("m", 1) is Progress.DONE
        assert await hall.pid("m")

    in_hall(tmp_path, test)


def test_no_worker_is_asked_for_and_none_starts(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        assert await hall.register("m", 0) is Progress.REGISTERED
        assert hall.workers() == []
        assert hall.registry.health() == "Healthy"
        with pytest.raises(NoWorker):
            hall.ask("m")

    in_hall(tmp_path, test)


def test_an_asynchronous_registration_that_fails_stays_and_is_tried_again(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="raise ValueError('bad')")
        assert await hall.register("m", synchronous=False) is Progress.STARTED
        (slot,) = hall.slots("m")
        assert await slot.first_attempt is not None
        await until(lambda: not slot.is_alive)
        with pytest.raises(NoWorker, match="do not start: ValueError: bad"):
            hall.ask("m")
        assert hall.registry.health() == "Unhealthy"
        assert hall.registry.describe("m").workers[0].status == "LOADING"

        (tmp_path / "m" / "service.py").write_text("def handle(data, context):\n    return ['ok']")
        await until(lambda: hall.registry.health() == "Healthy" and slot.failure is None)
        assert isinstance(await hall.ask("m"), Result)

    in_hall(tmp_path, test)


def test_a_pause_between_restarts_does_not_hold_up_a_removal(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="raise ValueError('bad')")
        await hall.register("m", synchronous=False)
        (slot,) = hall.slots("m")
        await slot.first_attempt
        await until(lambda: not slot.is_alive)
        async with asyncio.timeout(0.9):  # the pause is of one second
            await hall.registry.unregister("m")

    in_hall(tmp_path, test)


def test_a_model_whose_workers_are_given_up_says_why_at_once(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="if os.path.exists('bad'): raise ValueError('bad weights')")
        bad = tmp_path / "m" / "bad"
        bad.touch()
        await hall.register("m", 2, synchronous=False)
        waits = hall.ask("m")
        assert "bad weights" in str(await waits)
        with pytest.raises(NoWorker, match="bad weights"):
            hall.ask("m")
        described = hall.registry.describe("m")
        assert described.state == "FAILED"
        assert "bad weights" in str(described.cause)
        assert described.workers == []
        assert hall.registry.health() == "Unhealthy"

        bad.unlink()
        assert await hall.scale("m", 1) is Progress.DONE
        assert await hall.pid("m")
        assert hall.registry.health() == "Healthy"

    in_hall(tmp_path, test, max_worker_restarts=0)


def test_health_counts_workers_that_serve_or_start(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="if os.path.exists('bad'): raise ValueError('bad')")
        await hall.register("m", 2)
        assert hall.registry.health() == "Healthy"
        (tmp_path / "m" / "bad").touch()
        for slot, health in zip(hall.slots("m"), ["Partial Healthy", "Unhealthy"], strict=True):
            assert slot.worker is not None and slot.worker.pid is not None
            os.kill(slot.worker.pid, signal.SIGKILL)
            await until(lambda slot=slot: slot.failure is not None and not slot.is_alive)  # type: ignore[misc]
            # The first one tries again after a second, and counts while it does.
            await until(lambda health=health: hall.registry.health() == health)  # type: ignore[misc]
        await hall.scale("m", 0)
        assert hall.registry.health() == "Healthy"

    in_hall(tmp_path, test)


# Scaling


def test_scaling_follows_minimum_and_maximum(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m", 1)
        for low, high, workers in [(3, 3, 3), (1, 5, 3), (1, 2, 2), (0, 4, 0), (2, 4, 2)]:
            assert await hall.scale("m", low, high) is Progress.DONE
            described = hall.registry.describe("m")
            assert (described.minWorkers, described.maxWorkers) == (low, high)
            assert len(described.workers) == workers
            assert len(hall.workers()) == workers

    in_hall(tmp_path, test)


def test_no_request_is_lost_while_workers_come_and_go(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m", 2)
        outcomes = []
        for workers in (1, 3, 1, 2, 1):
            scaling = asyncio.create_task(hall.scale("m", workers))
            while not scaling.done():
                outcomes.append(hall.ask("m", "sleep 0.001"))
                await asyncio.sleep(0)
                if len(outcomes) % 20 == 0:
                    await outcomes[-1]
            await scaling
        answers = [await outcome for outcome in outcomes]
        assert [one for one in answers if not isinstance(one, Result)] == []

    in_hall(tmp_path, test, job_queue_size=10_000)


def test_scaling_up_does_not_wait_for_those_that_drain(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m", 1)
        running = await hall.begin("m", "sleep 0.5")
        down = asyncio.create_task(hall.scale("m", 0))
        await asyncio.sleep(0)
        assert await hall.scale("m", 1, synchronous=False) is Progress.STARTED
        (slot,) = hall.slots("m")
        assert await slot.first_attempt is None
        assert await hall.pid("m")
        assert not running.done()
        assert isinstance(await running, Result)
        assert await down is Progress.DONE

    in_hall(tmp_path, test)


def test_a_scaling_that_another_overtakes_says_so(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load=GATE)
        await hall.register("m", 0)
        up = asyncio.create_task(hall.scale("m", 2))
        await until(lambda: len(hall.workers()) == 2)
        await hall.scale("m", 0)
        assert await up is Progress.PARTIAL

        up = asyncio.create_task(hall.scale("m", 2))
        await until(lambda: len(hall.workers()) == 2)
        await hall.registry.unregister("m")
        with pytest.raises(ModelNotFound):
            await up

    in_hall(tmp_path, test)


def test_a_scaling_whose_workers_fail_fails_and_keeps_the_model(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="raise MemoryError")
        await hall.register("m", 0)
        with pytest.raises(WorkersFailed) as failed:
            await hall.scale("m", 1)
        assert failed.value.out_of_memory
        assert hall.registry.describe("m").minWorkers == 1

    in_hall(tmp_path, test)


# Removing


def test_a_removal_lets_the_running_finish_and_refuses_the_waiting(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        running = await hall.begin("m", "sleep 0.3")
        waiting = [hall.ask("m") for _ in range(3)]
        removal = asyncio.create_task(hall.registry.unregister("m"))
        assert {type(await one) for one in waiting} == {ModelGone}
        with pytest.raises(ModelNotFound):
            hall.ask("m")
        # The name is free while the old one drains.
        assert await hall.register("m") is Progress.DONE
        assert isinstance(await running, Result)
        await removal
        assert await hall.pid("m")

    in_hall(tmp_path, test)


def test_what_takes_longer_than_the_removal_may_is_killed(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        running = await hall.begin("m", "sleep 60")
        await hall.registry.unregister("m")
        died = await running
        assert isinstance(died, WorkerDied)
        assert not died.out_of_memory
        await hall.is_empty()

    in_hall(tmp_path, test, unregister_model_timeout=0)


def test_a_model_can_be_removed_only_once(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        await hall.begin("m", "sleep 0.1")
        answers = await asyncio.gather(
            hall.registry.unregister("m"),
            hall.registry.unregister("m"),
            return_exceptions=True,
        )
        assert answers[0] is None
        assert isinstance(answers[1], ModelNotFound)

    in_hall(tmp_path, test)


def test_what_is_gone_is_forgotten(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        elsewhere, before = len(remembered()), 0
        for turn in range(15):
            await hall.register("m", preload_model=turn % 2 == 0)
            await hall.pid("m")
            await hall.scale("m", 2)
            await hall.registry.unregister("m")
            await hall.is_empty()
            before = before or descriptors()
        assert descriptors() == before
        assert len(remembered()) == elsewhere

    in_hall(tmp_path, test)


def test_a_process_that_cannot_be_reaped_costs_a_408_and_no_request(
    tmp_path: Path,
) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        running = await hall.begin("m", "sleep 60")
        os.kill(hall.zygote.pid, signal.SIGSTOP)  # who should kill and reap it
        try:
            with pytest.raises(UnregisterTimedOut):
                await hall.registry.unregister("m")
            assert isinstance(await running, WorkerDied)
            assert hall.fetcher.in_use == 1  # its files are in use
        finally:
            os.kill(hall.zygote.pid, signal.SIGCONT)
        await hall.is_empty()

    in_hall(tmp_path, test, unregister_model_timeout=0, reap_limit_s=0.2)


# Deaths


def test_a_killed_worker_is_replaced_without_a_word(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        (before,) = hall.registry.describe("m").workers
        pid = await hall.pid("m")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid))
        assert await hall.pid("m") != pid
        (after,) = hall.registry.describe("m").workers
        assert (after.id, after.startTime) == (before.id, before.startTime)

    in_hall(tmp_path, test)


def test_a_template_that_dies_while_it_forks_is_replaced(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m", preload_model=True)
        template = hall.model("m").pool._mould.worker.pid  # type: ignore[union-attr]
        assert template
        os.kill(template, signal.SIGSTOP)
        scaling = asyncio.create_task(hall.scale("m", 3))
        await asyncio.sleep(0)
        os.kill(template, signal.SIGKILL)
        assert await scaling is Progress.DONE
        assert len({worker.pid for worker in hall.registry.describe("m").workers}) == 3

    in_hall(tmp_path, test)


def test_a_library_that_dies_while_it_forks_is_replaced(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        await hall.zygote.library.settled.wait()
        hall.write("m", "return str(os.getpid())", setup="assert 'colorsys' in sys.modules")
        await hall.register("m")
        library = hall.zygote.library.pid
        os.kill(library, signal.SIGSTOP)
        scaling = asyncio.create_task(hall.scale("m", 3))
        await asyncio.sleep(0)
        os.kill(library, signal.SIGKILL)
        await until(lambda: hall.zygote.library.is_ready and hall.zygote.library.pid != library)
        assert await hall.scale("m", 4) is Progress.DONE
        await asyncio.wait({scaling})

    in_hall(tmp_path, test, imports=["colorsys"])


def test_a_zygote_that_dies_while_it_starts_workers_is_replaced(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        zygote = hall.zygote.pid
        os.kill(zygote, signal.SIGSTOP)
        scaling = asyncio.create_task(hall.scale("m", 3))
        await asyncio.sleep(0)
        os.kill(zygote, signal.SIGKILL)
        assert await scaling is Progress.DONE
        assert hall.zygote.pid != zygote
        assert len(hall.workers()) == 3

    in_hall(tmp_path, test)


def test_an_order_to_kill_outlives_the_zygote_that_had_it(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        running = await hall.begin("m", "sleep 60")
        os.kill(hall.zygote.pid, signal.SIGSTOP)
        removal = asyncio.create_task(hall.registry.unregister("m"))
        await asyncio.sleep(0.02)  # the order is in the zygote's socket
        os.kill(hall.zygote.pid, signal.SIGKILL)
        await removal
        assert isinstance(await running, WorkerDied)
        await hall.is_empty()

    in_hall(tmp_path, test, unregister_model_timeout=0)


def test_a_template_lives_on_without_its_zygote(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="open('loads', 'a').write('x')")
        await hall.register("m", preload_model=True)
        zygote = hall.zygote.pid
        os.kill(zygote, signal.SIGKILL)
        await until(lambda: hall.zygote.pid not in (0, zygote))
        assert await hall.scale("m", 2) is Progress.DONE
        assert (tmp_path / "m" / "loads").read_text() == "x"
        running = await hall.begin("m", "sleep 60")
        await hall.scale("m", 0)  # kills the one that neither zygote has started
        assert isinstance(await running, WorkerDied)

    in_hall(tmp_path, test, unregister_model_timeout=0)


def test_a_worker_whose_prediction_takes_too_long_does_not_get_another(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m", response_timeout_s=0.3)
        died = await hall.ask("m", "sleep 60")
        assert isinstance(died, WorkerDied)
        assert "default_response_timeout_seconds" in str(died)
        assert await hall.pid("m")

    in_hall(tmp_path, test)


# Settings


@pytest.mark.parametrize(("timeout_s", "fails"), [(0, True), (-1, False), (None, False)])
def test_a_registration_has_a_time_limit_of_its_own(
    tmp_path: Path, timeout_s: float | None, fails: bool
) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        assert await hall.register("m", response_timeout_s=timeout_s) is Progress.DONE
        outcome = await hall.ask("m", "sleep 0.1")
        assert isinstance(outcome, WorkerDied if fails else Result)

    in_hall(tmp_path, test)


def test_debug_means_one_worker_and_all_the_time_in_the_world(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m", 3, response_timeout_s=0)
        assert len(hall.workers()) == 1
        assert isinstance(await hall.ask("m", "sleep 0.1"), Result)
        await hall.scale("m", 2, 4)
        described = hall.registry.describe("m")
        assert (described.minWorkers, described.maxWorkers, len(described.workers)) == (1, 1, 1)

    in_hall(tmp_path, test, debug=True)


def test_what_lies_in_a_worker_in_advance_counts_as_waiting(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        for _ in range(3):
            await hall.pid("m")  # quick: from now on it gets work in advance
        running = await hall.begin("m", "sleep 0.2")
        waiting = [hall.ask("m") for _ in range(5)]
        with pytest.raises(QueueFull):
            hall.ask("m")
        assert {type(await one) for one in [running, *waiting]} == {Result}

    in_hall(tmp_path, test, job_queue_size=5)


@pytest.mark.parametrize(
    ("policy", "delay_ms", "sizes"),
    [
        ("auto", None, "122"),  # nobody asked for a wait: a free worker takes what is there
        ("auto", 600_000, "333"),
        ("immediate", 600_000, "122"),
        ("fill", None, "333"),  # within Multi Model Server's 100 ms
        ("fill", 0, "122"),
    ],
)
def test_a_batch_is_waited_for_where_the_registration_or_the_settings_want_it(
    tmp_path: Path, policy: str, delay_ms: int | None, sizes: str
) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        (tmp_path / "m" / "service.py").write_text(
            "def handle(data, context):\n"
            "    return None if data is None else [str(len(data))] * len(data)\n"
        )
        await hall.register("m", batch_size=3, max_batch_delay_ms=delay_ms)
        answers = [await one for one in [hall.ask("m") for _ in range(3)]]
        assert "".join(bytes(one.body).decode() for one in answers) == sizes  # type: ignore[union-attr]

    in_hall(tmp_path, test, batch_policy=policy)


def test_devices_go_in_turn_and_stay_with_their_worker(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", "return str(os.getpid())", load="print('gpu', context.system_properties)")
        await hall.register("m", 2)
        await hall.register("m", 2, model_name="other")
        ids = [slot.gpu_id for name in ("m", "other") for slot in hall.slots(name)]
        assert ids == [1, 2, 0, 1]
        assert all(worker.gpu for worker in hall.registry.describe("m").workers)

        (slot, _) = hall.slots("m")
        assert slot.worker is not None and slot.worker.pid is not None
        first = slot.worker
        os.kill(slot.worker.pid, signal.SIGKILL)
        await until(lambda: slot.worker is not first and slot.worker.state.value == "ready")
        assert slot.worker.gpu_id == 1
        assert sum("'gpu_id': 1" in line for line in hall.lines) == 3

    in_hall(tmp_path, test, gpus=3)


def test_metrics_of_the_load_are_heard_once(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="context.metrics.add_counter('Loads', 1)")
        await hall.register("m", 2)
        assert sum("Loads" in line for line in hall.metrics) == 2
        hall.metrics.clear()
        await hall.register("m", 2, model_name="shared", preload_model=True)
        assert sum("Loads" in line for line in hall.metrics) == 1

    in_hall(tmp_path, test)


def test_a_worker_that_was_replaced_serves_its_last_batch(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load="open('loads', 'a').write('x')\n" + "time.sleep(0.05)")
        await hall.register("m")
        first = await hall.pid("m")
        for _ in range(2):
            await hall.pid("m")
        running = await hall.begin("m", "sleep 0.3")
        (slot,) = hall.slots("m")
        await until(lambda: slot.worker is not None and slot.worker.pid != first)
        assert await hall.pid("m") != first
        assert isinstance(await running, Result)
        await until(lambda: not is_alive(first))

    in_hall(tmp_path, test, worker_max_requests=3)


def test_a_removal_does_not_wait_for_a_successor_that_loads(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        load = "open('loads', 'a').write('x')\n"
        load += "if open('loads').read() == 'xx': time.sleep(600)"
        hall.write("m", load=load)
        await hall.register("m")
        await hall.pid("m")
        await until(lambda: (tmp_path / "m" / "loads").read_text() == "xx")
        assert await hall.pid("m")  # the old one serves meanwhile
        async with asyncio.timeout(5):
            await hall.registry.unregister("m")
        await hall.is_empty()

    in_hall(tmp_path, test, worker_max_requests=1)


# The start


def test_models_of_the_start_are_fetched_together_and_the_first_of_a_name_wins(
    tmp_path: Path,
) -> None:
    async def test(hall: Hall) -> None:
        for url in ("slow/m", "quick/m", "other"):
            hall.write(url)
        hall.fetcher.held["slow/m"] = asyncio.Event()
        starting = asyncio.create_task(
            hall.registry.register_at_start(
                [(None, "slow/m"), (None, "quick/m"), ("o", "other"), (None, "absent")]
            )
        )
        await until(lambda: hall.fetcher.in_use == 2)  # nobody waits for the slow one
        hall.fetcher.held["slow/m"].set()
        failed = await starting
        assert [(name, type(why)) for name, why in failed] == [
            ("quick/m", ModelExists),
            ("absent", SourceNotFound),
        ]
        assert hall.registry.describe("m").modelUrl == "slow/m"
        assert hall.registry.describe("m").loadedAtStartup
        assert await hall.registry.failed_to_start() == []

    in_hall(tmp_path, test)


def test_a_model_with_a_name_of_its_own_does_not_wait_for_others_of_the_start(
    tmp_path: Path,
) -> None:
    async def test(hall: Hall) -> None:
        for url in ("slow", "quick"):
            hall.write(url)
        hall.fetcher.held["slow"] = asyncio.Event()
        starting = asyncio.create_task(
            hall.registry.register_at_start([("a", "slow"), ("b", "quick")])
        )
        await until(lambda: hall.registry.has("b"))
        assert await hall.pid("b")
        assert hall.registry.sole_startup_model() == "b"
        hall.fetcher.held["slow"].set()
        assert await starting == []
        assert hall.registry.sole_startup_model() is None

    in_hall(tmp_path, test)


def test_a_start_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        for url in ("slow/m", "quick/m"):
            hall.write(url)
        hall.fetcher.held["slow/m"] = asyncio.Event()
        starting = asyncio.create_task(
            hall.registry.register_at_start([(None, "slow/m"), (None, "quick/m")])
        )
        await until(lambda: hall.fetcher.in_use == 1)
        starting.cancel()
        await asyncio.wait({starting})
        await hall.is_empty()

    in_hall(tmp_path, test)


def test_who_failed_to_start_is_known(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("good")
        hall.write("bad", load="raise ValueError")
        assert await hall.registry.register_at_start([(None, "bad"), (None, "good")]) == []
        assert await hall.registry.failed_to_start() == ["bad"]

    in_hall(tmp_path, test)


def test_models_of_the_start_are_missing_until_they_are_there_or_given_up(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        registry = hall.registry
        hall.write("here/m")
        entries = [(None, "here/m"), ("m", "here/m"), ("a", "x"), ("b", "y"), (None, "z.mar/c")]
        await registry.register_at_start(entries)
        assert registry.missing_at_start() == ["a", "b", "c"]  # `m` is there, whichever won
        hall.write("x", load="raise ValueError")
        with pytest.raises(WorkersFailed):
            await hall.register("x", model_name="a")
        assert registry.missing_at_start() == ["a", "b", "c"]
        await hall.register("here/m", model_name="a")
        assert registry.missing_at_start() == ["b", "c"]
        hall.write("y")
        await hall.register("y", model_name="of another name")
        assert registry.missing_at_start() == ["c"]
        await registry.unregister("c")
        assert registry.missing_at_start() == []
        await registry.unregister("a")
        assert registry.missing_at_start() == []
        with pytest.raises(ModelNotFound):
            await registry.unregister("c")

    in_hall(tmp_path, test)


def test_a_model_of_the_start_is_none_when_registered_again(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.registry.register_at_start([(None, "m")])
        assert hall.registry.sole_startup_model() == "m"
        await hall.registry.unregister("m")
        await hall.register("m")
        assert hall.registry.sole_startup_model() is None
        assert not hall.registry.describe("m").loadedAtStartup

    in_hall(tmp_path, test)


# The end


def test_a_stop_lets_work_finish_and_takes_no_more(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        running = await hall.begin("m", "sleep 0.2")
        waiting = hall.ask("m")
        await hall.registry.close(timeout_s=10)
        assert isinstance(await running, Result)
        assert isinstance(await waiting, Result)
        for act in (hall.register("m"), hall.scale("m", 1)):
            with pytest.raises((ShuttingDown, ModelNotFound)):
                await act
        await hall.is_empty()

    in_hall(tmp_path, test)


def test_a_stop_ends_what_takes_longer_than_it_may(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m")
        running = await hall.begin("m", "sleep 60")
        waiting = hall.ask("m")
        await hall.registry.close(timeout_s=0.1)
        assert isinstance(await running, WorkerDied)
        assert isinstance(await waiting, ShuttingDown)
        await hall.is_empty()

    in_hall(tmp_path, test)


def test_a_stop_that_is_hurried_ends_what_is_being_removed(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m")
        await hall.register("m", 2)
        await hall.register("m", model_name="other")
        removed, running = await hall.begin("m", "sleep 60"), await hall.begin("other", "sleep 60")
        removal = asyncio.create_task(hall.registry.unregister("m"))
        await asyncio.sleep(0)
        politely = asyncio.create_task(hall.registry.close(timeout_s=60))
        await asyncio.sleep(0.05)
        politely.cancel()
        async with asyncio.timeout(5):
            await hall.registry.close(timeout_s=0)
        assert isinstance(await removed, WorkerDied)
        assert isinstance(await running, WorkerDied)
        await removal
        await hall.is_empty()

    in_hall(tmp_path, test)


def test_a_stop_ends_loads_and_registrations(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        hall.write("m", load=GATE)
        hall.write("slow")
        hall.fetcher.held["slow"] = asyncio.Event()
        loading = asyncio.create_task(hall.register("m"))
        fetching = asyncio.create_task(hall.register("slow"))
        await until(lambda: len(hall.workers()) == 1)
        await hall.registry.close(timeout_s=0.1)
        with pytest.raises(WorkersFailed, match="it was stopped"):
            await loading
        hall.fetcher.held["slow"].set()
        with pytest.raises(ShuttingDown):
            await fetching
        await hall.is_empty()

    in_hall(tmp_path, test)


def test_the_end_of_a_stop_does_not_need_a_zygote(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_hall(tmp_path) as hall:
            hall.write("m")
            await hall.register("m")
            pid = await hall.pid("m")
            os.kill(hall.zygote.pid, signal.SIGKILL)
        assert not is_alive(pid)
        await until(lambda: platform.descendants(os.getpid()) == [])

    run(test())


def test_errors_of_the_registry_are_ours(tmp_path: Path) -> None:
    async def test(hall: Hall) -> None:
        for act in (hall.scale("ghost", 1), hall.registry.unregister("ghost")):
            with pytest.raises(ServeError, match="Model not found: ghost"):
                await act
        with pytest.raises(ModelNotFound):
            hall.registry.describe("ghost")

    in_hall(tmp_path, test)
