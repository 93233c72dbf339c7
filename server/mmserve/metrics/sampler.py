"""Host metrics, again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from mmserve.metrics.host import HostUsage

#: Before the first sample, so that it has an interval to tell of.
FIRST_AFTER_S = 0.5


async def sample_host(
    emit: Callable[[str], None], *, interval_s: float, hostname: str, usage: HostUsage | None = None
) -> None:
    """Emits a sample soon after the start and then every `interval_s`, until cancelled.

    A thread takes the samples: on a machine with many processors the kernel needs milliseconds
    to write /proc/stat, and a hanging disk needs longer.
    """
    usage = usage or HostUsage()
    loop = asyncio.get_running_loop()
    next_at = loop.time() + min(FIRST_AFTER_S, interval_s)
    while True:
        await asyncio.sleep(next_at - loop.time())
        for line in await asyncio.to_thread(
            usage.lines, hostname=hostname, timestamp=int(time.time())
        ):
            emit(line)
        next_at = max(next_at + interval_s, loop.time())
