"""The queue of one model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.errors import QueueFull, ServeError
from mmserve.scheduling.batcher import Batcher
from mmserve.scheduling.job import Job, Result

INFINITY = float("inf")


def job(name: str = "") -> Job:
    return Job(name, [], [], lambda _: None)


def batcher(
    *, capacity: int = 100, size: int = 4, delay_s: float = 0.1, wait_s: float = INFINITY
) -> Batcher:
    return Batcher("m", capacity, size, delay_s, wait_s)


@given(
    gaps_s=st.lists(st.floats(0, 0.3), max_size=30),
    size=st.integers(-1, 8),
    delay_s=st.floats(0, 0.5),
    cancelled=st.sets(st.integers(0, 29)),
)
def test_every_job_leaves_once_and_in_order(
    gaps_s: list[float], size: int, delay_s: float, cancelled: set[int]
) -> None:
    queue, now, out = batcher(size=size, delay_s=delay_s), 0.0, []
    jobs = [job(str(n)) for n in range(len(gaps_s))]
    for n, gap_s in enumerate(gaps_s):
        now += gap_s
        queue.put(jobs[n], now)
        jobs[n].is_cancelled = n in cancelled
        out.append(queue.take(now))
    while len(queue):
        now = max(now, queue.next_deadline())
        out.append(queue.take(now))

    assert [one for batch in out for one in batch] == [
        one for n, one in enumerate(jobs) if n not in cancelled
    ]
    assert all(len(batch) <= max(1, size) for batch in out)
    assert queue.next_deadline() == queue.next_expiry() == INFINITY


@given(waiting=st.integers(1, 9), age_s=st.floats(0, 1))
def test_a_batch_leaves_when_it_is_full_or_its_oldest_job_is_old_enough(
    waiting: int, age_s: float
) -> None:
    queue = batcher(size=4, delay_s=0.5)
    for _ in range(waiting):
        queue.put(job(), 0.0)
    taken = queue.take(age_s)
    if waiting >= 4:
        assert len(taken) == 4
    else:
        assert len(taken) == (waiting if age_s >= 0.5 else 0)


@given(capacity=st.integers(1, 10), in_advance=st.integers(0, 5))
def test_no_more_jobs_wait_than_the_capacity_says(capacity: int, in_advance: int) -> None:
    queue = batcher(capacity=capacity)
    with pytest.raises(QueueFull, match=f"{capacity} requests already wait"):
        for _ in range(capacity + 1):
            queue.put(job(), 0.0, in_advance=in_advance)
    assert len(queue) == max(0, capacity - in_advance)


def test_jobs_nobody_waits_for_make_room() -> None:
    queue = batcher(capacity=2)
    gone = job()
    queue.put(gone, 0.0)
    queue.put(job(), 0.0)
    gone.is_cancelled = True
    queue.put(job(), 0.0)
    assert len(queue) == 2


def test_jobs_put_back_are_first_again() -> None:
    queue = batcher(size=1)
    first, second, third = job("1"), job("2"), job("3")
    queue.put(third, 0.0)
    queue.put_back([first, second])
    assert [queue.take(0.0)[0] for _ in range(3)] == [first, second, third]


def test_a_job_that_waits_too_long_is_given_up() -> None:
    queue = batcher(wait_s=5)
    old, young = job(), job()
    queue.put(old, 0.0)
    queue.put(young, 3.0)
    assert queue.next_expiry() == 5
    assert queue.expire(4.9) == []
    assert queue.expire(5.0) == [old]
    assert queue.next_expiry() == 8


def test_a_drained_queue_is_empty() -> None:
    queue = batcher()
    gone, here = job(), job()
    gone.is_cancelled = True
    queue.put(gone, 0.0)
    queue.put(here, 0.0)
    assert queue.drain() == [here]
    assert not len(queue)


def test_a_result_has_no_times_until_somebody_measured_them() -> None:
    result = Result(200, None, [], b"")
    assert (result.queue_s, result.handler_s) == (None, None)
    assert not isinstance(result, ServeError)
