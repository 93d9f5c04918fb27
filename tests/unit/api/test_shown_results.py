"""Results as a Python session shows them: one short line each."""

from pathlib import Path

from toy_runs.runs import config

from marl_ray.api.comparing import RunComparison
from marl_ray.api.evaluating.benchmarks import BenchmarkResult
from marl_ray.api.evaluating.episodes import EpisodeScores
from marl_ray.api.training import TrainedRun
from marl_ray.runs.comparison import SeedGroup
from marl_ray.training.run_result import RunResult
from marl_ray.tuning.records import SweepRecords, TrialRecord
from marl_ray.tuning.running.driver import SweepResult


def test_a_result_is_one_short_line():
    result = RunResult("toy", "models:/toy/1", "b", None, "sqlite:///m.db", "1", 0.5, {}, ["best 0.5", "last 0.4"])
    assert repr(TrainedRun(config(), result)) == "<TrainedRun toy: score 0.500, models:/toy/1>"
    groups = [SeedGroup(name, [], None, {}) for name in ("first", "second")]
    assert repr(RunComparison("eval/return", groups, "toy")) == "<RunComparison eval/return of first, second>"
    scores = EpisodeScores([0.5] * 1000, [7] * 1000, 0)
    assert repr(scores) == "<EpisodeScores score 0.500 [0.500, 0.500] of 1000 episodes, 7.0 steps each>"
    records = SweepRecords("toy", {}, {}, status="finished", trials=[TrialRecord(0, {}), TrialRecord(1, {})])
    sweep = SweepResult("toy", "/runs/toy", records, "/runs/toy/report.html")
    assert repr(sweep) == "<SweepResult toy: finished, 2 trials; /runs/toy>"
    report = {"scores": {"hardened": {"pass@1": {"value": 0.5, "low": 0.25, "high": 0.75}}}}
    assert repr(BenchmarkResult(report, Path("out"))) == "<BenchmarkResult hardened pass@1 0.5; out>"
