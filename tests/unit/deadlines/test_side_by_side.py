"""Calls side by side: how many run at once, whose error is raised, and when a deadline ends the wait."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from marl_ray.deadlines.side_by_side import CallTimeoutError, run_side_by_side, shut_down


def fail(message: str) -> None:
    raise ValueError(message)


def test_all_calls_are_made_and_as_many_at_once_as_there_are_threads():
    together, made = threading.Barrier(3), []

    def call(i: int) -> None:
        together.wait(60)  # breaks unless three calls run at once
        made.append(i)

    run_side_by_side([partial(call, i) for i in range(6)], 3, 60.0)
    assert sorted(made) == list(range(6))


def test_one_thread_makes_the_calls_in_their_order():
    made: list[int] = []
    run_side_by_side([partial(made.append, i) for i in range(20)], 1, 60.0)
    assert made == list(range(20))


def test_the_error_of_the_first_call_is_raised_though_a_later_one_fails_earlier():
    later_failed = threading.Event()
    made: list[int] = []

    def fail_late() -> None:
        assert later_failed.wait(60)
        fail("first")

    def fail_early() -> None:
        later_failed.set()
        fail("second")

    with pytest.raises(ValueError, match=r"^first$"):
        run_side_by_side([fail_late, fail_early, partial(made.append, 2)], 2, 60.0)
    assert made == [2]


def test_a_call_that_hangs_is_named_and_no_waiting_call_is_made_after_it():
    gate = threading.Event()
    made: list[int] = []
    before = set(threading.enumerate())

    def hang() -> None:
        gate.wait(60)

    with pytest.raises(CallTimeoutError, match=r"^call 1 did not return in time$") as late:
        run_side_by_side([lambda: None, hang, partial(made.append, 2)], 1, 0.2)
    assert late.value.index == 1
    hanging_threads = set(threading.enumerate()) - before
    assert [thread.daemon for thread in hanging_threads] == [True]
    gate.set()
    for thread in hanging_threads:
        thread.join(60)
    assert made == []


def test_the_deadline_of_a_call_counts_from_its_own_beginning():
    # Together the calls take longer than the deadline; each has 1.5 s of it left on a machine that is not busy.
    run_side_by_side([partial(time.sleep, 0.5)] * 5, 1, 2.0)


def test_an_executor_is_shut_down_with_the_calls_that_have_not_begun():
    gate, begun = threading.Event(), threading.Event()
    executor = ThreadPoolExecutor(1)

    def hang() -> None:
        begun.set()
        assert gate.wait(60)

    running, waiting = executor.submit(hang), executor.submit(fail, "never made")
    assert begun.wait(60)
    assert not shut_down(executor, 0.05)
    assert waiting.cancelled()
    gate.set()
    running.result(60)
    assert shut_down(executor, 60.0)
