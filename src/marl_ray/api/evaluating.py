"""`marl_ray.evaluate`: the scores of a bundle or of ready samples, on a benchmark or on whole episodes."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from marl_ray.api.calls import check_known, ray_of_call, short_interrupt
from marl_ray.api.episodes import EpisodeScores, evaluate_episodes
from marl_ray.api.evaluate_options import OPTIONS, convert_options, make_records
from marl_ray.config import resolve_tracking_uri
from marl_ray.errors import FieldError
from marl_ray.evaluation.options import (
    EPISODE_MAX_STEPS,
    EPISODE_SEED,
    EpisodeOptions,
    Progress,
    RunningOptions,
    ScoringOptions,
    WebRequest,
    WritingRequest,
)
from marl_ray.json_types import JsonObject

if TYPE_CHECKING:
    from marl_ray.evaluation.benchmarks import AnswerKind
    from marl_ray.evaluation.scoring.evaluate import EvaluationPlan, ScoringTask
    from marl_ray.evaluation.scoring.local import Scorer
    from marl_ray.evaluation.web_agents.protocol import WebBenchmark
    from marl_ray.evaluation.writing.requests import SampleWriter
    from marl_ray.sandbox import Level

ScoringMode: TypeAlias = Literal["official", "hardened", "both"]
SandboxLevel: TypeAlias = Literal["limits", "paths", "namespaces"]


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


@overload
def evaluate(
    benchmark: str,
    policy: str | Path | None = None,
    samples: str | Path | None = None,
    *,
    data: str | Path | None = None,
    split: str | None = None,
    sha256: str | None = None,
    out: str | Path | None = None,
    k: int | Sequence[int] | None = None,
    mode: ScoringMode | None = None,
    timeout_s: float | None = None,
    min_level: "SandboxLevel | Level | None" = None,
    workers: int | None = None,
    local: bool = False,
    env: Mapping[str, object] | None = None,
    tracking_uri: str | None = None,
    progress: Progress | None = None,
    agent: str | None = None,
    num_samples: int | None = None,
    seed: int | None = None,
    greedy: bool = False,
    temperature: float | None = None,
    max_tokens: int | None = None,
    answer: "AnswerKind | None" = None,
    prompt: str | None = None,
) -> BenchmarkResult: ...
@overload
def evaluate(
    *,
    policy: str | Path,
    episodes: int,
    seed: int = EPISODE_SEED,
    greedy: bool = False,
    env: Mapping[str, object] | None = None,
    max_steps: int = EPISODE_MAX_STEPS,
    tracking_uri: str | None = None,
) -> EpisodeScores: ...
@short_interrupt()
def evaluate(
    benchmark: str | None = None,
    policy: str | Path | None = None,
    samples: str | Path | None = None,
    **options: object,
) -> BenchmarkResult | EpisodeScores:
    """Score a bundle or ready samples on a benchmark, or a bundle on whole episodes.

    With a `benchmark`, a name or `jsonl:FILE`, it scores a bundle's language models (`policy`) or ready samples
    (`samples`); without one, a bundle's actor-critics on so many whole `episodes` of the environment that they were
    trained in. Each kind of evaluation has its own options and refuses those of the others; one that is None or False
    counts as not given. An interrupted evaluation is resumed from its folder `out`.

    On any benchmark:

    - out: folder of results and report; by default one under `runs/evaluations`.
    - k: value or values of pass@k; all possible ones by default.
    - split: part of the problems; all by default, and in a browser the part `test`.
    - workers: programs at a time on a machine; in a browser, episodes at a time.
    - local: score in this process, without Ray. Benchmarks in a browser (`webarena`, `miniwob`) always run so.
    - progress: function of what is counted, the number done and the total.

    On a benchmark of problems:

    - data, sha256: file or URI of the problems, and the digest that it must have.
    - mode: `official`, `hardened` or `both`; all that the benchmark has by default.
    - timeout_s: seconds for a program; the benchmark's own by default.
    - min_level: weakest acceptable sandbox: `limits`, `paths` (by default) or `namespaces`.

    With a `policy` on a benchmark; in a browser it may also be `expert`, `random` or `package.module:NAME`:

    - agent: the agent whose policy answers alone.
    - num_samples: samples of each problem, or in a browser episodes of each task; 1 by default.
    - seed, greedy: seed of sampling, 0 by default; or take the most likely token each time.
    - temperature, max_tokens: those of sampling; the bundle's own by default.
    - answer, prompt: form of the answers (`completion`, `solution` or `output`), and a text that the policy reads, in
      which `{prompt}` stands for the benchmark's. A browser has neither.
    - env: options of a browser's environment.
    - tracking_uri: MLflow that knows `models:/`; that of MLFLOW_TRACKING_URI or `runs/mlflow.db` by default.

    With `episodes`, beside `policy` and `tracking_uri`:

    - seed, greedy: seed of starts and actions, 1000 by default; or take the most likely action each time. With one seed
      all bundles meet the same starts.
    - max_steps: environment steps after which an episode is truncated; 2000 by default.
    - env: options that replace those of the run's environment.

    Raises MarlRayError (a FieldError where one argument is wrong).
    """
    from marl_ray.evaluation.web_agents.protocol import web_benchmark

    for name in options:
        check_known(name, OPTIONS)
    arguments = convert_options(options | {"benchmark": benchmark, "policy": policy, "samples": samples})
    if "episodes" in arguments:
        if policy is None:
            raise FieldError("policy", "expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS")
        return evaluate_episodes(*make_records(arguments, (EpisodeOptions,), "expected none beside `episodes`"))
    if benchmark is None:
        raise FieldError("benchmark", "expected a benchmark's name, or `episodes`, a number of whole ones to play")
    if (web := web_benchmark(benchmark)) is not None:
        if policy is None:
            raise FieldError("policy", "expected a bundle, expert, random or package.module:NAME")
        del arguments["benchmark"]
        refusal = f"{web.name} has none: it is played in a browser, whose options are `env`"
        return _play_in_browser(web, *make_records(arguments, (WebRequest, RunningOptions), refusal))
    if (samples is None) == (policy is None):
        raise FieldError("policy", "expected a bundle, which writes samples, or `samples`, ready ones")
    if samples is not None:
        refusal = "expected with a policy, not with ready samples"
        return _score_ready_samples(*make_records(arguments, (ScoringOptions, RunningOptions), refusal))
    refusal = "expected with a benchmark in a browser, or with `episodes`"
    return _score_written_samples(*make_records(arguments, (ScoringOptions, WritingRequest, RunningOptions), refusal))


def _play_in_browser(benchmark: "WebBenchmark", request: WebRequest, running: RunningOptions) -> BenchmarkResult:
    """Play a benchmark in browsers that this process starts, with or without `local`."""
    from marl_ray.evaluation.web_agents.evaluate import evaluate_web

    request = replace(request, tracking_uri=resolve_tracking_uri(request.tracking_uri))
    return BenchmarkResult(*evaluate_web(benchmark, request, running.progress))


def _score_ready_samples(options: ScoringOptions, running: RunningOptions) -> BenchmarkResult:
    """Score the samples of a file."""
    from marl_ray.evaluation.scoring.evaluate import prepare_evaluation

    plan = prepare_evaluation(options)
    with nullcontext() if running.local else ray_of_call():
        return _score_plan(plan, running)


def _score_written_samples(
    options: ScoringOptions, request: WritingRequest, running: RunningOptions
) -> BenchmarkResult:
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
