"""Threads that share a process of vLLM come to their turns in the order in which they ask."""

import itertools
import threading

import pytest

from marl_ray.policies.engines.base import EngineLostError
from marl_ray.policies.engines.vllm.process.decoder_ports import FairLock

PATIENCE_S = 60.0


def test_a_thread_that_asks_again_and_again_starves_nobody():
    lock, order, both = FairLock(), [], threading.Barrier(2)

    def ask(name: str) -> None:
        both.wait(PATIENCE_S)
        for _ in range(200):
            with lock.turn(PATIENCE_S):
                order.append(name)
                waiting.wait(1e-4)  # as a step takes its time, in which the other one asks

    waiting = threading.Event()
    threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    switches = sum(before != after for before, after in itertools.pairwise(order))
    assert len(order) == 400 and switches > 200


def test_who_waits_in_vain_gives_its_place_up():
    lock = FairLock()
    with (
        lock.turn(),
        pytest.raises(EngineLostError, match=r"^generation\.engine=vllm: other arms used its process for 0\.01 s$"),
        lock.turn(0.01),
    ):
        pass
    with pytest.raises(ZeroDivisionError), lock.turn(PATIENCE_S):
        1 / 0  # noqa: B018
    with lock.turn(PATIENCE_S):
        pass
