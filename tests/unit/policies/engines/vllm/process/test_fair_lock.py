"""Threads that share a process of vLLM come to their turns in the order in which they ask."""

import threading

import pytest
from waiting import until

from marl_ray.policies.engines.base import EngineLostError
from marl_ray.policies.engines.vllm.process.decoder_ports import FairLock

PATIENCE_S = 60.0


def test_a_thread_that_asks_again_at_once_comes_after_those_that_wait():
    lock, order = FairLock(), []

    def take_turn():
        with lock.turn(PATIENCE_S):
            order.append("waits")

    for _ in range(20):
        waiting = threading.Thread(target=take_turn, daemon=True)
        with lock.turn(PATIENCE_S):
            waiting.start()
            # Nothing public says whether another thread waits.
            until(lambda: len(lock._queue) == 2, "the other thread to ask for its turn")  # noqa: SLF001
        with lock.turn(PATIENCE_S):
            order.append("asks again")
        waiting.join(PATIENCE_S)
    assert order == ["waits", "asks again"] * 20


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
