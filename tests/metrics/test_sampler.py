import asyncio

from mmserve.metrics.sampler import sample_host
from tests.metric_lines import parse_line


def test_samples_come_soon_after_the_start_and_again() -> None:
    async def scene() -> list[str]:
        lines: list[str] = []
        twice = asyncio.Event()

        def emit(line: str) -> None:
            lines.append(line)
            if sum("MemoryUtilization" in line for line in lines) == 2:
                twice.set()

        task = asyncio.create_task(sample_host(emit, interval_s=0.05, hostname="vm"))
        await twice.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        return lines

    found = [parse_line(line) for line in asyncio.run(scene())]
    assert all(found)
    assert {"CPUUtilization", "DiskUsage", "MemoryUsed"} <= {m.name for m in found if m}
