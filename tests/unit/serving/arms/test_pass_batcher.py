"""Arms join the passes of an experiment and leave them from other threads than the event loop's."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from toy_serving.gateways import make_bundle
from watched_lock import watch_lock

from marl_ray.policies.actor_critic.stacked import Stack
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.serving.arms import actor_critic
from marl_ray.serving.arms.actor_critic import ArmBatcher, PassBatcher

OBSERVATIONS = {"agent_0": np.array([0, 1, 2])}
ACTIONS = {"one": 1, "two": 2, "three": 3}
ROUNDS = 20
"""Times that each thread joins and leaves, and times that the steady arm acts meanwhile; more are as good."""


@pytest.fixture(scope="module")
def of_actions(tmp_path_factory) -> dict[str, ActorCriticBundle]:
    """Bundles that always take the action of their name."""
    folder = tmp_path_factory.mktemp("bundles")
    return {name: load_bundle(make_bundle(folder / name, action)) for name, action in ACTIONS.items()}


@pytest.fixture
def passes() -> PassBatcher:
    return PassBatcher(64, np.random.default_rng(0))


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Python's threads take turns every few microseconds."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def shared(monkeypatch) -> list[int]:
    """Sizes of the passes that went through a stack."""
    sizes, act = [], Stack.act

    def count_and_act(self, *inputs):
        sizes.append(len(inputs[0]))
        return act(self, *inputs)

    monkeypatch.setattr(Stack, "act", count_and_act)
    return sizes


async def actions_of(*arms: ArmBatcher) -> list[int]:
    answers = await asyncio.wait_for(asyncio.gather(*(arm.act(OBSERVATIONS, True) for arm in arms)), 60)
    return [int(answer["agent_0"][0]) for answer in answers]


async def test_arms_that_join_and_leave_in_a_thread_share_passes_meanwhile(of_actions, passes, shared):
    first = ArmBatcher(of_actions["one"], passes)
    assert await actions_of(first) == [1]
    second = await asyncio.to_thread(ArmBatcher, of_actions["two"], passes)
    assert await actions_of(first, second) == [1, 2]
    await asyncio.to_thread(first.close)
    assert await actions_of(second, second) == [2, 2]
    assert shared == [1, 2, 2]
    assert await actions_of(first, second) == [1, 2]  # a request that was assigned before its arm was closed
    assert shared == [1, 2, 2]


async def test_an_arm_that_leaves_keeps_the_bundle_that_another_arm_has_too(of_actions, passes, shared):
    control, same, other = (ArmBatcher(of_actions[name], passes) for name in ("one", "one", "two"))
    assert await actions_of(control, same, other) == [1, 1, 2]
    same.close()
    assert await actions_of(control, other) == [1, 2]
    assert shared == [3, 2]


async def test_an_arm_that_joins_while_the_stack_is_made_shares_the_next_pass(of_actions, shared, monkeypatch):
    lock, threads = watch_lock(monkeypatch, actor_critic), []
    passes = PassBatcher(64, np.random.default_rng(0))
    first, late, made = ArmBatcher(of_actions["one"], passes), [], actor_critic.Stack  # type: ignore[attr-defined]  # the test replaces it

    def join_meanwhile(bundles):
        monkeypatch.setattr(actor_critic, "Stack", made)
        thread = threading.Thread(target=lambda: late.append(ArmBatcher(of_actions["three"], passes)))
        thread.start()
        threads.append(thread)
        lock.wait_for_waiter()
        return made(bundles)

    monkeypatch.setattr(actor_critic, "Stack", join_meanwhile)
    second = ArmBatcher(of_actions["two"], passes)
    assert await actions_of(first, second) == [1, 2]
    threads[0].join(60)
    shared.clear()
    assert await actions_of(first, second, late[0]) == [1, 2, 3]
    assert shared == [3]


@pytest.mark.usefixtures("_frequent_switches")
async def test_every_request_is_answered_by_its_own_arm_while_others_join_and_leave(of_actions, passes, shared):
    steady, stop, stayed = ArmBatcher(of_actions["one"], passes), threading.Event(), []

    rounds = [0, 0, 0]

    def join_and_leave(number: int, name: str) -> None:
        while not stop.is_set():
            ArmBatcher(of_actions[name], passes).close()
            rounds[number] += 1
        stayed.append(ArmBatcher(of_actions[name], passes))

    threads = [threading.Thread(target=join_and_leave, args=thread) for thread in enumerate(("two", "two", "three"))]
    for thread in threads:
        thread.start()
    acts, end = 0, time.monotonic() + 60
    try:
        while min(acts, *rounds) < ROUNDS:
            assert await actions_of(steady, steady) == [1, 1]
            acts += 1
            assert time.monotonic() < end, f"waited 60 s for {ROUNDS} acts and rounds of each thread: {acts}, {rounds}"
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    shared.clear()
    assert sorted(await actions_of(steady, *stayed)) == [1, 2, 2, 3]
    assert shared == [4]
