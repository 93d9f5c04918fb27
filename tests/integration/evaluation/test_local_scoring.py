"""Scoring on this machine: runs that hang."""

import threading
from dataclasses import dataclass, field

import pytest

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import ModelAnswer
from marl_ray.evaluation.benchmarks.base import Problem
from marl_ray.evaluation.scoring import local
from marl_ray.evaluation.scoring.local import ScoringJob, score_locally
from marl_ray.evaluation.writing.samples import Sample


@dataclass(frozen=True)
class HangingProblem(Problem):
    """A problem whose tests hang until they are released."""

    released: threading.Event = field(default_factory=threading.Event)

    def score(self, pool, source, modes, timeout_s):
        self.released.wait()
        return {}


def test_runs_that_hang_are_an_error_and_nobody_waits_for_them(monkeypatch):
    monkeypatch.setattr(local, "SLACK_S", 0.05)
    monkeypatch.setattr(local, "START_S", 0.0)
    problem = HangingProblem("own/0", "", "", ())
    jobs = [ScoringJob("sample", Sample(problem, 0, ModelAnswer("solution", "1")), ("official",), 0.01)] * 3
    rescue = threading.Timer(10.0, problem.released.set)
    rescue.start()
    try:
        with pytest.raises(MarlRayError, match=r"^evaluate: nothing was scored for 0 s; running: own/0, own/0$"):
            list(score_locally(None, jobs, 1))
        assert not problem.released.is_set(), "the error waited for the runs"
    finally:
        rescue.cancel()
        problem.released.set()
