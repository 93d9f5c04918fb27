"""Copies of traffic: what they count, and that they never get in the way."""

import asyncio
import logging
from contextlib import suppress

import numpy as np
import pytest
from waiting import until_async

from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher
from marl_ray.serving.arms.protocol import Answer
from marl_ray.serving.routing.shadow import COMPLAINT_S, Shadows

SEEN = {"a": np.array([0, 1, 2]), "b": np.array([2, 3, 4])}


def answers(a, b) -> Answer:
    return {"a": (np.asarray(a), -0.1), "b": (np.asarray(b), -0.2)}


async def settle(shadows: Shadows) -> None:
    """All copies have ended."""
    await until_async(lambda: not shadows.under_way, "the end of all copies")


async def test_agreement_is_counted_per_decision_and_copies_are_greedy():
    requests, now = [], 0.0

    async def act(observations, greedy, masks):
        nonlocal now
        now += 0.25
        requests.append((observations, greedy, masks))
        return answers(1, [0.5, 2.0])

    shadows, masks = Shadows(4, clock=lambda: now), {"a": np.array([True, False])}
    assert shadows.send("new", act, SEEN, masks, answers(1, [0.5, 2.0]))
    assert shadows.send("new", act, SEEN, masks, answers(1, [0.5, 2.5]))
    assert not requests, "the caller waited"
    await settle(shadows)
    totals = shadows.totals
    new = totals["new"]
    assert (new.acts, new.errors, new.dropped, new.decisions, new.agreed) == (2, 0, 0, 4, 3)
    assert new.seconds == 0.5
    assert all(seen is SEEN and greedy is True and allowed is masks for seen, greedy, allowed in requests)


async def test_a_real_arm_is_compared(bundles):
    agents = {"agent_0": np.array([0, 1, 2]), "agent_1": np.array([2, 3, 4])}

    arm_one, arm_four = (
        ArmBatcher(load_bundle(bundles[arm]), PassBatcher(64, np.random.default_rng(0))) for arm in ("one", "four")
    )
    shadows = Shadows(4)
    for arm, batcher in (("one", arm_one), ("four", arm_four)):
        shadows.send(arm, batcher.act, agents, {}, await arm_one.act(agents, True))
    await settle(shadows)
    totals = shadows.totals
    assert {arm: (t.decisions, t.agreed) for arm, t in totals.items()} == {"one": (2, 2), "four": (2, 0)}


async def test_more_than_the_limit_are_dropped_and_counted():
    gate = asyncio.Event()

    async def act(observations, greedy, masks):
        await gate.wait()
        return answers(1, 1)

    shadows = Shadows(2)
    sent = [shadows.send("new", act, SEEN, {}, answers(1, 1)) for _ in range(5)]
    gate.set()
    await settle(shadows)
    sent.append(shadows.send("new", act, SEEN, {}, answers(1, 1)))
    await settle(shadows)
    totals = shadows.totals["new"]
    assert sent == [True, True, False, False, False, True]
    assert (totals.acts, totals.dropped) == (3, 3)


async def _fails(observations, greedy, masks):
    raise RuntimeError("no weights\nand more")


async def _hangs(observations, greedy, masks):
    await asyncio.Event().wait()


async def _forgets_an_agent(observations, greedy, masks):
    return {"a": (np.asarray(1), 0.0)}


async def _is_cancelled_from_within(observations, greedy, masks):
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    return await future


def _is_no_coroutine(observations, greedy, masks):
    raise TypeError


@pytest.mark.parametrize("act", [_fails, _hangs, _forgets_an_agent, _is_cancelled_from_within, _is_no_coroutine])
async def test_failures_and_timeouts_are_counted_and_raise_nothing(act, caplog):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    shadows = Shadows(4, deadline_s=0.01)
    assert shadows.send("new", act, SEEN, {}, answers(1, 1))
    await settle(shadows)
    totals = shadows.totals["new"]
    assert (totals.acts, totals.errors, totals.decisions, totals.agreed, totals.seconds) == (0, 1, 0, 0, 0.0)
    assert not complaints
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "\n" not in caplog.messages[0]


async def test_errors_are_logged_once_a_minute_per_arm(caplog):
    now = [0.0]

    shadows = Shadows(4, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, COMPLAINT_S - 1, COMPLAINT_S, COMPLAINT_S + 1):
        shadows.send("new", _fails, SEEN, {}, answers(1, 1))
        await settle(shadows)
    shadows.send("other", _fails, SEEN, {}, answers(1, 1))
    await settle(shadows)
    assert caplog.messages == [
        "shadow new: 1 copies failed so far, this one of RuntimeError: no weights",
        "shadow new: 4 copies failed so far, this one of RuntimeError: no weights",
        "shadow other: 1 copies failed so far, this one of RuntimeError: no weights",
    ]


async def test_close_cancels_what_is_under_way_and_no_more_is_sent(caplog):
    cancelled = []

    async def act(observations, greedy, masks):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    shadows = Shadows(4)
    for _ in range(3):
        shadows.send("new", act, SEEN, {}, answers(1, 1))
    await asyncio.sleep(0)
    await shadows.close()
    sent = shadows.send("new", act, SEEN, {}, answers(1, 1))
    totals = shadows.totals["new"]
    assert not sent
    assert len(cancelled) == 3
    assert (totals.errors, totals.dropped) == (0, 1)
    assert not caplog.messages


async def test_close_does_not_wait_for_ever_for_an_arm_that_ignores_it():
    async def act(observations, greedy, masks):
        for _ in range(50):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return answers(1, 1)

    shadows = Shadows(1, deadline_s=0.02)
    shadows.send("new", act, SEEN, {}, answers(1, 1))
    await asyncio.sleep(0)
    await shadows.close()
    assert shadows.under_way == 1
