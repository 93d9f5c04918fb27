"""The wait for the sinks of a run that begins, by a clock of the test's own."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
from clocks import Clock
from pyarrow import fs
from toy_runs.runs import config

from marl_ray.errors import MarlRayError
from marl_ray.training.journal import deliveries
from marl_ray.training.journal.deliveries import Deliveries
from marl_ray.training.journal.delivery import Delivery

LOCAL = fs.LocalFileSystem()
DEADLINE_S = 60.0
"""Seconds within which a thread must have done what the test let it do."""


class LateSink:
    """A sink that takes nothing and opens when the test lets it."""

    def __init__(self, may_open: threading.Event):
        assert may_open.wait(DEADLINE_S), "the test has not let the sink open"

    def log(self, rows):
        pass

    def end(self, status):
        pass


def test_all_sinks_together_have_the_time_that_the_line_says(monkeypatch, tmp_path):
    clock, lines, may_open = Clock(0.0), [], {"slow": threading.Event(), "slower": threading.Event()}

    def let_slow_open(line: str) -> None:
        lines.append(line)
        may_open["slow"].set()
        assert slow.opened_or_failed.wait(DEADLINE_S), "slow has not opened"
        clock.now = 119.99

    monkeypatch.setattr(deliveries, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(deliveries, "SAY_AFTER_S", 0.05)
    sinks = Deliveries(config(f"storage={tmp_path}"), "id", LOCAL, str(tmp_path), let_slow_open, {}, names=[])
    for name, event in may_open.items():
        make = partial(LateSink, event)
        sinks.deliveries.append(Delivery(name, make, LOCAL, str(tmp_path), lines.append, is_new_run=True))
    slow, slower = sinks.deliveries
    try:
        with pytest.raises(
            MarlRayError, match=r"^tracking.also: slower cannot be used: it has not opened within 120 s$"
        ):
            sinks.check_open(120.0)
    finally:
        sinks.abandon()
        for event in may_open.values():
            event.set()
        for delivery in (slow, slower):
            delivery.thread.join(DEADLINE_S)
    assert lines == ["waiting for slow to open, for 120 s at most"]
