"""The wait for the sinks of a run that begins, by a clock of the test's own."""

from types import SimpleNamespace

import pytest
from clocks import Clock
from pyarrow import fs
from toy_runs.runs import config

from marl_ray.errors import MarlRayError
from marl_ray.training.journal import deliveries
from marl_ray.training.journal.deliveries import Deliveries


class LateSink:
    """A delivery whose sink opens at a moment of the clock."""

    def __init__(self, name: str, clock: Clock, opens_at: float):
        self.name, self.failure = name, ""
        self._clock, self._opens_at = clock, opens_at
        self.opened_or_failed, self.stopped = self, SimpleNamespace(set=lambda: None)

    def wait(self, seconds: float) -> bool:
        self._clock.now = max(self._clock.now, min(self._opens_at, self._clock.now + seconds))
        return self.sink is not None

    @property
    def sink(self) -> object | None:
        return self if self._clock.now >= self._opens_at else None


def test_all_sinks_together_have_the_time_that_the_line_says(monkeypatch, tmp_path):
    clock, lines = Clock(0.0), []
    monkeypatch.setattr(deliveries, "time", SimpleNamespace(monotonic=clock))
    sinks = Deliveries(
        config(f"storage={tmp_path}"), "id", fs.LocalFileSystem(), str(tmp_path), lines.append, {}, names=[]
    )
    sinks.deliveries = [LateSink("slow", clock, 119.0), LateSink("slower", clock, 125.0)]
    with pytest.raises(MarlRayError, match=r"^tracking.also: slower cannot be used: it has not opened within 120 s$"):
        sinks.check_open(120.0)
    assert clock.now == 120.0
    assert lines == ["waiting for slow to open, for 120 s at most"]
