"""`marl_ray.evaluate` on a benchmark: of ready samples, of those that a bundle writes, or of episodes in a browser."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.api.calls import ray_of_call
from marl_ray.config import resolve_tracking_uri
from marl_ray.evaluation.options import RunningOptions, ScoringOptions, WebRequest, WritingRequest
from marl_ray.json_types import JsonObject

if TYPE_CHECKING:
    from marl_ray.evaluation.scoring.evaluate import EvaluationPlan, ScoringTask
    from marl_ray.evaluation.scoring.local import Scorer
    from marl_ray.evaluation.web_agents.protocol import WebBenchmark
    from marl_ray.evaluation.writing.requests import SampleWriter


@dataclass(frozen=True)
class BenchmarkResult:
    """A finished evaluation."""

    report: JsonObject
    """`scores` (mode -> number such as `pass@1` -> value and its 95 % interval `low`, `high`), `problems`, `evaluation` (the
    facts that determine the numbers) and more; `report.json` in the folder holds it."""
    folder: Path
    """Folder with `report.md`, `report.json` and the results by problem."""

    @property
    def scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mode -> number -> value, low, high."""
        scores: dict[str, dict[str, dict[str, float]]] = self.report["scores"]
        return scores

    def __repr__(self) -> str:
        numbers = [
            f"{mode} {number} {score['value']!r}"
            for mode, scores in self.scores.items()
            for number, score in scores.items()
        ]
        return f"<BenchmarkResult {', '.join(numbers)}; {self.folder}>"

    def _repr_markdown_(self) -> str:
        return (self.folder / "report.md").read_text()


def play_in_browser(benchmark: "WebBenchmark", request: WebRequest, running: RunningOptions) -> BenchmarkResult:
    """Play a benchmark in browsers that this process starts, with or without `local`."""
    from marl_ray.evaluation.web_agents.evaluate import evaluate_web

    request = replace(request, tracking_uri=resolve_tracking_uri(request.tracking_uri))
    return BenchmarkResult(*evaluate_web(benchmark, request, running.progress))


def score_ready_samples(options: ScoringOptions, running: RunningOptions) -> BenchmarkResult:
    """Score the samples of a file."""
    from marl_ray.evaluation.scoring.evaluate import prepare_evaluation

    plan = prepare_evaluation(options)
    with nullcontext() if running.local else ray_of_call():
        return _score_plan(plan, running)


def score_written_samples(options: ScoringOptions, request: WritingRequest, running: RunningOptions) -> BenchmarkResult:
    """Let a bundle's policies write samples, and score these."""
    from marl_ray.evaluation.scoring.evaluate import choose_ks, prepare_evaluation, read_task
    from marl_ray.evaluation.writing.requests import SAMPLES_FILE, write_samples

    task = read_task(options)
    with nullcontext() if running.local else ray_of_call():
        # Writers may run on other machines, whose environment and folder are not these.
        request = replace(request, tracking_uri=resolve_tracking_uri(request.tracking_uri))
        problems = task.data.problems
        choose_ks({problem.task_id: request.num_samples for problem in problems}, options.k, ())
        facts = {"benchmark": task.benchmark.name, "data_sha256": task.data.sha256}
        with _writers(request, task, running.local) as source:
            folder, description = write_samples(source, request, problems, facts, options.out, running.progress)
        options = replace(options, samples=str(folder / SAMPLES_FILE), out=folder)
        return _score_plan(prepare_evaluation(options, task, description), running)


def _score_plan(plan: "EvaluationPlan", running: RunningOptions) -> BenchmarkResult:
    """Score the samples of a plan in the sandbox."""
    from marl_ray.evaluation.scoring.evaluate import evaluate as score

    return BenchmarkResult(score(plan, _scorer(plan, running), running.progress), plan.folder)


@contextmanager
def _writers(request: WritingRequest, task: "ScoringTask", local: bool) -> Iterator["SampleWriter"]:
    """Yield what writes samples, in this process or in actors of Ray, within the block."""
    if local:
        from marl_ray.evaluation.writing.writer import Writer

        yield Writer(request, task.benchmark)
        return
    from marl_ray.evaluation.writing.ray_writing import ray_writers

    with ray_writers(request, task.name) as source:
        yield source


@contextmanager
def _scorer(plan: "EvaluationPlan", running: RunningOptions) -> Iterator["Scorer"]:
    """Yield what scores samples, in sandboxes of this process or of Ray's workers, within the block."""
    if not running.local:
        from marl_ray.evaluation.scoring.ray_scoring import ray_scorer

        with ray_scorer(running.workers, plan.packages, plan.min_level) as scorer:
            yield scorer
        return
    from marl_ray.evaluation.scoring.local import make_pool, score_locally

    count = running.workers or len(os.sched_getaffinity(0))
    with make_pool(count, plan.packages, plan.min_level) as pool:
        yield lambda jobs: score_locally(pool, jobs, count)
