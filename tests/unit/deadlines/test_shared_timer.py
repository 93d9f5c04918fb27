"""Deadlines by one timer behave as a timeout of asyncio's own."""

import asyncio

import pytest

from marl_ray.deadlines.shared_timer import Deadlines


async def test_work_in_time_is_returned_and_late_work_is_cancelled():
    deadlines, cancelled = Deadlines(), []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            cancelled.append(seconds)
            raise
        return seconds

    assert await deadlines.run(work(0.01), 5) == 0.01
    many = [asyncio.create_task(deadlines.run(work(s), 0.1)) for s in (0.0, 0.01, 3.0, 4.0)]
    results = await asyncio.gather(*many, return_exceptions=True)
    assert results[:2] == [0.0, 0.01]
    assert [type(result) for result in results[2:]] == [TimeoutError, TimeoutError]
    assert sorted(cancelled) == [3.0, 4.0]
    # Nobody's cancellation is left behind: the same task continues.
    with pytest.raises(TimeoutError):
        await deadlines.run(work(3.0), 0.01)
    await asyncio.sleep(0)
    assert asyncio.current_task().cancelling() == 0


async def test_a_cancellation_from_outside_is_one():
    deadlines = Deadlines()
    task = asyncio.create_task(deadlines.run(asyncio.sleep(5), 5))
    await asyncio.sleep(0)  # it has begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
