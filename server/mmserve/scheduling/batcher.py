"""Jobs waiting for one model. Quiet: time comes in as `now`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from mmserve.errors import QueueFull
from mmserve.scheduling.job import Job

#: Looking for jobs that nobody waits for costs some 30 ns each; so it takes a few percent at most.
_LOOK_S_PER_JOB = 1e-6


class Batcher:
    """First in, first out; no clock, lock or task.

    Args:
        model: for the error's text.
        capacity: jobs that may wait.
        size: jobs in a batch at most; below 1 counts as 1.
        max_delay_s: how long the oldest job waits for a batch to fill; 0 takes what is there.
        max_wait_s: how long a job waits at all.
    """

    def __init__(
        self, model: str, capacity: int, size: int, max_delay_s: float, max_wait_s: float
    ) -> None:
        self.model, self.capacity = model, capacity
        self.size = max(1, size)
        self.max_delay_s = max_delay_s if self.size > 1 else 0.0
        self.max_wait_s = max_wait_s
        self._jobs: deque[Job] = deque()
        self._look_again_at = -math.inf

    def __len__(self) -> int:
        """Jobs that wait, with those that nobody waits for any more."""
        return len(self._jobs)

    @property
    def has_jobs(self) -> bool:
        """Whether a job waits whose outcome somebody wants."""
        return any(not job.is_cancelled for job in self._jobs)

    def put(self, job: Job, now: float, *, in_advance: int = 0) -> None:
        """Raises QueueFull when `capacity` jobs already wait.

        Args:
            in_advance: jobs that wait elsewhere, in a worker's socket; they count too.
        """
        if len(self._jobs) + in_advance >= self.capacity:
            self._make_room(now)
            if len(self._jobs) + in_advance >= self.capacity:
                raise QueueFull(self.model, self.capacity)
        job.put_at = now
        self._jobs.append(job)

    def put_back(self, jobs: Sequence[Job]) -> None:
        """To the head, in their order: jobs that a worker had not begun."""
        self._jobs.extendleft(reversed(jobs))

    def take(self, now: float) -> list[Job]:
        """A full batch, or what waits once the oldest job is `max_delay_s` old; else []."""
        if self.size == 1:
            while self._jobs:
                job = self._jobs.popleft()
                if not job.is_cancelled:
                    return [job]
            return []
        jobs = self._jobs
        while jobs and jobs[0].is_cancelled:
            jobs.popleft()
        if now < self.next_deadline() and not self._is_full():
            return []
        batch: list[Job] = []
        while jobs and len(batch) < self.size:
            job = jobs.popleft()
            if not job.is_cancelled:
                batch.append(job)
        return batch

    def next_deadline(self) -> float:
        """When `take` may answer without another `put`; infinity while nothing waits."""
        return self._jobs[0].put_at + self.max_delay_s if self._jobs else math.inf

    def next_expiry(self) -> float:
        """When `expire` may answer; infinity while nothing waits."""
        return self._jobs[0].put_at + self.max_wait_s if self._jobs else math.inf

    def expire(self, now: float) -> list[Job]:
        """Takes out the jobs that have waited `max_wait_s`."""
        late = []
        while self._jobs and self._jobs[0].put_at + self.max_wait_s <= now:
            late.append(self._jobs.popleft())
        return [job for job in late if not job.is_cancelled]

    def drain(self) -> list[Job]:
        """Takes out all that wait."""
        jobs = [job for job in self._jobs if not job.is_cancelled]
        self._jobs.clear()
        return jobs

    def _is_full(self) -> bool:
        """Whether a whole batch waits."""
        count = 0
        for job in self._jobs:
            count += not job.is_cancelled
            if count == self.size:
                return True
        return False

    def _make_room(self, now: float) -> None:
        """Drops the jobs that nobody waits for. Not at each refusal: a queue may be long."""
        if now >= self._look_again_at:
            self._jobs = deque(job for job in self._jobs if not job.is_cancelled)
            self._look_again_at = now + len(self._jobs) * _LOOK_S_PER_JOB
