"""Requests that share calls: none waits for company, none is lost, and one that fails fails alone."""

import asyncio

import pytest

from marl_ray.serving import gathering
from marl_ray.serving.gathering import Gathering


class Callee:
    """Doubles numbers, when it is let; keeps what every call had."""

    def __init__(self):
        self.calls, self.open = [], asyncio.Event()

    async def __call__(self, given):
        self.calls.append(list(given))
        await self.open.wait()
        return [ValueError(f"{n} is odd") if n % 2 else 2 * n for n in given]


def test_what_comes_while_calls_are_under_way_goes_together():
    async def run():
        callee = Callee()
        requests = Gathering(callee, calls=2, deadline_s=5)
        first = [asyncio.ensure_future(requests.ask(n)) for n in (0, 2)]
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(requests.ask(4))
        await asyncio.sleep(0.01)
        others = [asyncio.ensure_future(requests.ask(n)) for n in (6, 8, 10)]
        await asyncio.sleep(0.01)
        assert callee.calls == [[0, 2], [4]]
        callee.open.set()
        assert await asyncio.gather(*first, second, *others) == [0, 4, 8, 12, 16, 20]
        assert callee.calls[2:] == [[6, 8, 10]]
        assert await requests.ask(12) == 24

    asyncio.run(run())


def test_a_request_that_fails_fails_alone_and_a_call_that_fails_fails_all_its_requests():
    async def run():
        callee = Callee()
        callee.open.set()
        requests = Gathering(callee, calls=1, deadline_s=5)
        found = await asyncio.gather(*(requests.ask(n) for n in (1, 2)), return_exceptions=True)
        assert repr(found[0]) == "ValueError('1 is odd')" and found[1] == 4

        async def broken(given):
            raise OSError("gone")

        async def short(given):
            return []

        for call, message in ((broken, "gone"), (short, "expected 2 answers, got 0")):
            failing = Gathering(call, calls=1, deadline_s=5)
            found = await asyncio.gather(failing.ask(0), failing.ask(2), return_exceptions=True)
            assert [str(error) for error in found] == [message, message]

    asyncio.run(run())


def test_calls_that_hang_free_their_place_and_given_up_requests_are_not_sent():
    async def run():
        callee = Callee()
        requests = Gathering(callee, calls=1, deadline_s=0.3)
        hangs = asyncio.ensure_future(requests.ask(0))
        await asyncio.sleep(0.05)
        given_up, late = asyncio.ensure_future(requests.ask(2)), asyncio.ensure_future(requests.ask(4))
        await asyncio.sleep(0.05)
        given_up.cancel()
        with pytest.raises(TimeoutError):
            await hangs
        with pytest.raises(TimeoutError):
            await late
        callee.open.set()
        assert await requests.ask(6) == 12
        assert 2 not in [n for call in callee.calls for n in call]

    asyncio.run(run())


def test_a_call_has_a_largest_size(monkeypatch):
    monkeypatch.setattr(gathering, "LARGEST", 3)

    async def run():
        callee = Callee()
        callee.open.set()
        requests = Gathering(callee, calls=2, deadline_s=5)
        assert await asyncio.gather(*(requests.ask(n) for n in range(0, 20, 2))) == list(range(0, 40, 4))
        assert all(len(call) <= 3 for call in callee.calls)

    asyncio.run(run())
