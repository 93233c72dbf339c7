"""What takes minutes: `make soak`. Many idle models, long churn, and what they cost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import PID, SLEEPY, Server, together

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

TICK_S = 0.01  # of /proc/PID/stat, on Linux everywhere


def cpu_s(server: Server) -> dict[int, float]:
    """Processor time of each of its processes."""
    found = {}
    for pid in server.processes():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[pid] = (int(fields[11]) + int(fields[12])) * TICK_S
    return found


def memory_bytes(server: Server) -> int:
    """Memory of all its processes; a shared page counts once."""
    total = 0
    for pid in server.processes():
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def median_latency_s(server: Server, count: int = 200) -> float:
    spent = []
    for _ in range(count):
        start = time.perf_counter()
        assert server.predict("hot").status == 200
        spent.append(time.perf_counter() - start)
    return sorted(spent)[count // 2]


def test_two_hundred_idle_models_cost_next_to_nothing(start_server: StartServer) -> None:
    server = start_server()
    archive = server.add("m", PID)
    server.load(archive, model_name="hot")
    alone_s = median_latency_s(server)
    with together(8) as run:
        loads = [run(server.load, archive, model_name=f"m{number}") for number in range(199)]
        for each in loads:
            each.result()
    before, start = cpu_s(server), time.monotonic()
    time.sleep(60)
    # What a process that ended meanwhile had used is not known any more.
    used = sum(spent - before.get(pid, 0) for pid, spent in cpu_s(server).items())
    share = used / (time.monotonic() - start)
    print(f"\n200 idle models: {share:.2%} of a core, {memory_bytes(server) / 200e6:.1f} MB each")
    assert share < 0.02
    crowded_s = median_latency_s(server)
    print(f"median latency {alone_s * 1e3:.2f} ms alone, {crowded_s * 1e3:.2f} ms among 200")
    assert crowded_s < 1.5 * alone_s + 0.001


def test_a_thousand_loads_leave_nothing(start_server: StartServer) -> None:
    server = start_server()
    archive = server.add("m", PID, {"weights.bin": b"w" * 1_000_000})
    for _ in range(10):
        server.load(archive)
        server.unregister("m")
    files, memory = server.open_files(), memory_bytes(server)
    for _ in range(1000):
        server.load(archive)
        assert server.unregister("m").status == 200
    assert server.open_files() <= files + 3
    assert memory_bytes(server) < memory * 1.2 + 10_000_000


def test_no_request_is_lost_while_workers_come_and_go(start_server: StartServer) -> None:
    server = start_server(job_queue_size=1000)
    server.load(server.add("m", SLEEPY), initial_workers=2)
    end = time.monotonic() + 60

    def ask() -> int:
        count = 0
        while time.monotonic() < end:
            reply = server.predict("m", "0.005")
            assert reply.status == 200, reply
            count += 1
        return count

    with together(20) as run:
        crowd = [run(ask) for _ in range(8)]
        number = 0
        while time.monotonic() < end:
            number += 1
            assert server.scale("m", min_worker=1 + number % 4, synchronous=True).status == 200
        answered = sum(each.result() for each in crowd)
    print(f"\n{answered} requests, {number} changes of the number of workers, none lost")
