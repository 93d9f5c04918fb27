"""Threads note ends and reports at the same time, and nothing of it is lost."""

import math
import sys
import threading
import time
from collections.abc import Callable

import pytest

from marl_ray.serving.routing.endpoints import DRAIN_S
from marl_ray.serving.store_poll.ended_experiments import EndedExperiments


@pytest.fixture(autouse=True)
def switches_often():
    """Threads take turns every few steps, so that what is not atomic breaks."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*bodies: Callable[[], None]) -> None:
    """Run each in a thread of its own, all from the same moment."""
    start, errors = threading.Barrier(len(bodies)), []

    def run(body: Callable[[], None]) -> None:
        start.wait(60)
        try:
            body()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and not any(thread.is_alive() for thread in threads)


def test_no_end_is_lost_while_others_are_read_and_forgotten():
    ended, now = EndedExperiments(), time.time()
    added = threading.Event()
    new = [f"new{k}" for k in range(20_000)]

    def add() -> None:
        for name in new:
            ended.add(f"old {name}", now - 2 * DRAIN_S)
            ended.add(name, now)
        added.set()

    def read() -> None:
        while not added.is_set():
            ended.draining_experiments(now)
            ended.names()
            ended.due_looks()

    at_once(add, read, read)
    assert ended.draining_experiments(now).keys() == set(new) == set(ended.names())
    assert set(new) <= ended.due_looks().keys()


def test_a_report_that_comes_while_the_next_look_is_planned_is_not_put_off():
    ended, reported = EndedExperiments(), threading.Event()

    def report() -> None:
        try:
            for _ in range(50_000):
                ended.note_read("exp")
                ended.note_due("exp")
                assert ended.due_looks() == {"exp": -math.inf}
        finally:
            reported.set()

    def plan() -> None:
        while not reported.is_set():
            ended.note_due("exp", 100.0)

    at_once(report, plan)


def test_evidence_that_is_read_is_due_again_only_by_what_is_noted_later():
    ended = EndedExperiments()
    ended.add("exp", 5.0)
    ended.note_due("exp", 30.0)
    assert ended.due_looks() == {"exp": -math.inf}
    ended.note_read("exp")
    assert ended.due_looks() == {} and ended.names() == ["exp"]
    ended.note_due("exp", 30.0)
    ended.note_due("exp", 40.0)
    assert ended.due_looks() == {"exp": 30.0}
