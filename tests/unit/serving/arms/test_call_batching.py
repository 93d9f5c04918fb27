"""Requests that share calls: none waits for company, none is lost, and one that fails fails alone."""

import asyncio
import contextvars
from collections.abc import Callable

import pytest
from waiting import until_async

from marl_ray.serving.arms import call_batching
from marl_ray.serving.arms.call_batching import CallBatcher
from marl_ray.serving.arms.errors import LostError
from marl_ray.serving.errors import BusyError

DEADLINE_S = 600.0
"""Seconds that no stall of the machine lasts."""


class Callee:
    """Doubles numbers, when it is let; keeps what every call had."""

    def __init__(self):
        self.calls, self.open = [], asyncio.Event()

    async def __call__(self, batch):
        self.calls.append(list(batch))
        await self.open.wait()
        return [ValueError(f"{n} is odd") if n % 2 else 2 * n for n in batch]


@pytest.fixture
def pass_deadlines(monkeypatch) -> Callable[[], None]:
    """Moves the clock of the event loop behind the deadlines of all that is under way."""

    def move_clock() -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + DEADLINE_S + 1)

    return move_clock


async def test_what_comes_while_calls_are_under_way_goes_together():
    callee = Callee()
    requests = CallBatcher(callee, replicas=1, deadline_s=60)
    first = [asyncio.ensure_future(requests.ask(n)) for n in (0, 2)]
    await until_async(lambda: len(callee.calls) == 1, "the first call")
    second = asyncio.ensure_future(requests.ask(4))
    await until_async(lambda: len(callee.calls) == 2, "the second call")
    others = [asyncio.ensure_future(requests.ask(n)) for n in (6, 8, 10)]
    await asyncio.sleep(0.01)
    assert callee.calls == [[0, 2], [4]]
    callee.open.set()
    assert await asyncio.gather(*first, second, *others) == [0, 4, 8, 12, 16, 20]
    assert callee.calls[2:] == [[6, 8, 10]]
    assert await requests.ask(12) == 24


async def test_a_request_that_fails_fails_alone_and_a_call_that_fails_fails_all_its_requests():
    callee = Callee()
    callee.open.set()
    requests = CallBatcher(callee, replicas=1, deadline_s=60)
    results = await asyncio.gather(*(requests.ask(n) for n in (1, 2)), return_exceptions=True)
    assert repr(results[0]) == "ValueError('1 is odd')" and results[1] == 4

    async def broken(batch):
        raise OSError("gone")

    async def short(batch):
        return []

    for call, message in ((broken, "gone"), (short, "expected 2 answers, got 0")):
        failing = CallBatcher(call, replicas=1, deadline_s=60)
        errors = await asyncio.gather(failing.ask(0), failing.ask(2), return_exceptions=True)
        assert [str(error) for error in errors] == [message, message]
        assert errors[0].pass_number == errors[1].pass_number


async def test_calls_that_hang_free_their_place_and_given_up_requests_are_not_sent(pass_deadlines):
    callee = Callee()
    requests = CallBatcher(callee, replicas=1, deadline_s=DEADLINE_S)
    hangs = []
    for number, n in enumerate((0, 8), 1):
        hangs.append(asyncio.ensure_future(requests.ask(n)))
        await until_async(lambda number=number: len(callee.calls) == number, "a call that hangs")
    given_up, late = asyncio.ensure_future(requests.ask(2)), asyncio.ensure_future(requests.ask(4))
    await asyncio.sleep(0)  # both have asked
    given_up.cancel()
    await asyncio.sleep(0)
    pass_deadlines()
    results = await asyncio.gather(*hangs, late, return_exceptions=True)
    assert [type(error) for error in results] == [LostError] * 3
    assert results[0].pass_number != results[1].pass_number
    callee.open.set()
    assert await requests.ask(6) == 12
    assert 2 not in [n for call in callee.calls for n in call]


async def test_waiting_too_long_behind_calls_that_are_answered_is_no_failure(monkeypatch, pass_deadlines):
    monkeypatch.setattr(call_batching, "MAX_CALL_SIZE", 1)
    first_may_end, never = asyncio.Event(), asyncio.Event()
    called = []

    async def call(batch):
        called.extend(batch)
        await (first_may_end if batch == [0] else never).wait()
        return batch

    requests = CallBatcher(call, replicas=1, deadline_s=DEADLINE_S)
    answers = [asyncio.ensure_future(requests.ask(n)) for n in range(6)]
    await until_async(lambda: called == [0, 1], "two calls under way")
    first_may_end.set()
    assert await answers[0] == 0
    await until_async(lambda: called == [0, 1, 2], "the call that takes the place of the first")
    pass_deadlines()
    hung, refused = answers[1:3], answers[3:]
    results = await asyncio.gather(*hung, *refused, return_exceptions=True)
    assert [type(error) for error in results] == [LostError] * 2 + [BusyError] * 3


async def test_no_call_is_made_in_the_name_of_one_client():
    client = contextvars.ContextVar("client", default="nobody")
    names = []

    async def call(batch):
        names.append(client.get())
        await asyncio.sleep(0.01)
        return batch

    async def ask_all(requests, n):
        client.set(n)
        return await requests.ask(n)

    requests = CallBatcher(call, replicas=1, deadline_s=60)
    assert await asyncio.gather(*(ask_all(requests, n) for n in range(3))) == [0, 1, 2]
    assert await asyncio.gather(*(ask_all(requests, n) for n in range(3))) == [0, 1, 2]
    assert names == ["nobody", "nobody"]


async def test_a_call_that_the_other_side_cancels_fails_at_once():
    async def cancelled(batch):
        raise asyncio.CancelledError

    requests = CallBatcher(cancelled, replicas=1, deadline_s=30)
    results = await asyncio.wait_for(asyncio.gather(requests.ask(0), requests.ask(1), return_exceptions=True), 60)
    assert [str(error) for error in results] == ["the call was cancelled"] * 2


async def test_idle_replicas_share_a_burst():
    callee = Callee()
    callee.open.set()
    requests = CallBatcher(callee, replicas=4, deadline_s=60)
    await asyncio.gather(*(requests.ask(n) for n in range(0, 16, 2)))
    assert [len(call) for call in callee.calls] == [2, 2, 2, 2]


async def test_a_call_has_a_largest_size(monkeypatch):
    monkeypatch.setattr(call_batching, "MAX_CALL_SIZE", 3)

    callee = Callee()
    callee.open.set()
    requests = CallBatcher(callee, replicas=1, deadline_s=60)
    assert await asyncio.gather(*(requests.ask(n) for n in range(0, 20, 2))) == list(range(0, 40, 4))
    assert all(len(call) <= 3 for call in callee.calls)
