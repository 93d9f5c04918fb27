"""Readings are shared, fresh, bounded, and leave the processor to others."""

import asyncio
import threading
import time

import pytest

from marl_ray.serving import readings
from marl_ray.serving.http.protocol import RequestError
from marl_ray.serving.readings import Readings


def test_what_many_ask_for_at_once_is_made_once_and_never_before_the_question():
    made: list[int] = []
    stored = [0]

    def make() -> int:
        time.sleep(0.005)
        made.append(stored[0])
        return stored[0]

    async def body() -> None:
        readings = Readings()
        first = asyncio.create_task(readings.read("a", make))
        await asyncio.sleep(0.002)  # it is under way
        stored[0] = 1
        found = await asyncio.gather(*(readings.read("a", make) for _ in range(50)))
        assert found == [1] * 50
        await first
        assert len(made) == 2
        readings.close()

    asyncio.run(body())


def test_readers_without_pause_leave_it_alone_for_most_of_the_time():
    async def body() -> float:
        readings, busy = Readings(), [0.0]

        def make() -> None:
            begin = time.perf_counter()
            time.sleep(0.01)
            busy[0] += time.perf_counter() - begin

        end = time.monotonic() + 0.4

        async def reader() -> None:
            while time.monotonic() < end:
                await readings.read("a", make)

        await asyncio.gather(*(reader() for _ in range(20)))
        readings.close()
        return busy[0] / 0.4

    assert asyncio.run(body()) < 0.3


def test_a_rest_is_never_longer_than_a_second(monkeypatch):
    monkeypatch.setattr(readings, "REST_FACTOR", 1e9)
    monkeypatch.setattr(readings, "LONGEST_REST_S", 0.02)

    async def body() -> float:
        readings = Readings()
        begin = time.monotonic()
        for _ in range(3):
            await readings.read("a", lambda: None)
        readings.close()
        return time.monotonic() - begin

    assert 0.04 <= asyncio.run(body()) < 1.0


def test_different_readings_wait_in_a_bounded_queue_and_errors_reach_every_reader():
    async def body() -> list[BaseException | None]:
        readings, go = Readings(threads=1, waiting=3), threading.Event()

        def make() -> None:
            go.wait(5)
            raise ValueError("no")

        asked = [asyncio.create_task(readings.read(k, make)) for k in range(6)]
        asked.append(asyncio.create_task(readings.read(5, make)))
        await asyncio.sleep(0.01)
        go.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        readings.close()
        return found

    found = asyncio.run(body())
    refused = [error for error in found if isinstance(error, RequestError)]
    assert 2 <= len(refused) <= 4
    assert all(error.status == 503 and error.headers for error in refused)
    assert sum(isinstance(error, ValueError) for error in found) == len(found) - len(refused)


def test_a_reader_who_goes_away_leaves_the_answer_to_the_others():
    async def body() -> int:
        readings = Readings()

        def make() -> int:
            time.sleep(0.01)
            return 7

        first = asyncio.create_task(readings.read("a", make))
        second = asyncio.create_task(readings.read("a", make))
        await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        found = await second
        readings.close()
        return found

    assert asyncio.run(body()) == 7
