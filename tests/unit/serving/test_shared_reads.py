"""Reads are shared, fresh, bounded, and leave the processor to others."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from clocks import Clock
from waiting import until_async

from marl_ray.serving.errors import BusyError
from marl_ray.serving.shared_reads import SharedReads


async def test_what_many_ask_for_at_once_is_made_once_and_never_before_the_question():
    made: list[int] = []
    stored = [0]
    begun, go = threading.Event(), threading.Event()

    def make() -> int:
        value = stored[0]
        begun.set()
        assert go.wait(60)
        made.append(value)
        return value

    reads = SharedReads()
    first = asyncio.create_task(reads.read("a", make))
    await until_async(begun.is_set, "the first read")
    stored[0] = 1
    later = [asyncio.create_task(reads.read("a", make)) for _ in range(50)]
    await asyncio.sleep(0)  # all have asked
    go.set()
    results = await asyncio.gather(*later)
    assert results == [1] * 50
    await first
    assert len(made) == 2
    reads.close()


class PausingClock(Clock):
    """Time that passes only in reads and in pauses."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def taking(self, seconds: float) -> Callable[[], None]:
        """A reading that takes so long."""

        def make() -> None:
            self.now += seconds

        return make


@pytest.mark.parametrize(
    ("took_s", "pause_s"), [(0.01, 10 * 0.01), (0.1, 1.0), (5.0, 1.0)], ids=["ten times as long", "both", "a second"]
)
async def test_a_reading_pauses_ten_times_as_long_as_it_took_and_a_second_at_most(took_s, pause_s):
    clock = PausingClock()

    reads = SharedReads(clock=clock, sleep=clock.sleep)
    for _ in range(3):
        await asyncio.gather(*(reads.read("a", clock.taking(took_s)) for _ in range(20)))
    reads.close()
    assert clock.pauses == pytest.approx([pause_s, pause_s])


async def test_no_reading_waits_for_the_pause_of_another_or_for_one_that_is_over():
    clock = PausingClock()

    reads = SharedReads(clock=clock, sleep=clock.sleep)
    for what in ("a", "b"):
        await reads.read(what, clock.taking(0.01))
    clock.now += 0.3
    await reads.read("a", clock.taking(0.01))
    reads.close()
    assert clock.pauses == []


async def test_different_reads_wait_in_a_bounded_queue_and_errors_reach_every_reader():
    reads = SharedReads(threads=1, waiting=3)
    begun, go = threading.Event(), threading.Event()

    def make() -> None:
        begun.set()
        assert go.wait(60)
        raise ValueError("no")

    readers = [asyncio.create_task(reads.read(0, make))]
    await until_async(begun.is_set, "the first read")
    readers += [asyncio.create_task(reads.read(key, make)) for key in (1, 2, 3, 3)]
    await asyncio.sleep(0)  # all have asked
    with pytest.raises(BusyError, match=r"^3 readings wait already$") as refusal:
        await reads.read(4, make)
    go.set()
    results = await asyncio.gather(*readers, return_exceptions=True)
    reads.close()
    assert refusal.value.retry_after_s == 1
    assert [repr(error) for error in results] == ["ValueError('no')"] * 5


async def test_a_reader_who_goes_away_leaves_the_answer_to_the_others():
    reads = SharedReads()
    begun, go = threading.Event(), threading.Event()

    def make() -> int:
        begun.set()
        assert go.wait(60)
        return 7

    first = asyncio.create_task(reads.read("a", make))
    second = asyncio.create_task(reads.read("a", make))
    await until_async(begun.is_set, "the read")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    go.set()
    result = await second
    reads.close()
    assert result == 7
