"""`marl_ray.evaluate`: a bundle's policies, or ready samples, on a benchmark; or whole episodes of a bundle."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from marl_ray.api.calls import ray_of_call, short_interrupt
from marl_ray.api.episodes import MAX_STEPS, SEED, EpisodeScores, evaluate_episodes
from marl_ray.config import tracking_uri
from marl_ray.errors import FieldError, did_you_mean

if TYPE_CHECKING:
    from marl_ray.evaluation.scoring.evaluate import EvaluationOptions, EvaluationPlan, Progress, ScoringTask
    from marl_ray.evaluation.scoring.local_scoring import Scorer
    from marl_ray.evaluation.web_agents.base import WebBenchmark
    from marl_ray.evaluation.writing.requests import SampleWriter, WritingRequest

WRITING_OPTIONS = ("agent", "num_samples", "seed", "greedy", "temperature", "max_tokens", "answer", "prompt")
"""Arguments of `evaluate` that are about samples that a policy writes."""
WEB_OPTIONS = tuple(name for name in WRITING_OPTIONS if name not in ("answer", "prompt"))
"""Those of them that episodes in a browser have too."""


@dataclass(frozen=True)
class BenchmarkResult:
    """A finished evaluation."""

    report: dict[str, Any]
    """`scores` (mode -> number such as `pass@1` -> value and its 95 % interval `low`, `high`), `problems`, `evaluation` (the
    facts that determine the numbers) and more; `report.json` in the folder holds it."""
    folder: Path
    """Folder with `report.md`, `report.json` and the results by problem."""

    @property
    def scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mode -> number -> value, low, high."""
        scores: dict[str, dict[str, dict[str, float]]] = self.report["scores"]
        return scores

    def _repr_markdown_(self) -> str:
        return (self.folder / "report.md").read_text()


@overload
def evaluate(
    benchmark: str,
    policy: str | Path | None = None,
    samples: str | Path | None = None,
    *,
    data: str | None = None,
    split: str | None = None,
    sha256: str | None = None,
    out: str | Path | None = None,
    k: Sequence[int] | None = None,
    mode: Literal["official", "hardened", "both"] | None = None,
    timeout: float | None = None,
    min_level: Literal["limits", "paths", "namespaces"] = "paths",
    workers: int | None = None,
    local: bool = False,
    env: Mapping[str, Any] | None = None,
    tracking: str | None = None,
    progress: "Progress | None" = None,
    **writing: Any,
) -> BenchmarkResult: ...
@overload
def evaluate(
    *,
    policy: str | Path,
    episodes: int,
    seed: int = SEED,
    greedy: bool = False,
    env: Mapping[str, Any] | None = None,
    max_steps: int = MAX_STEPS,
    tracking: str | None = None,
) -> EpisodeScores: ...
@short_interrupt()
def evaluate(
    benchmark: str | None = None,
    policy: str | Path | None = None,
    samples: str | Path | None = None,
    *,
    data: str | None = None,
    split: str | None = None,
    sha256: str | None = None,
    out: str | Path | None = None,
    k: Sequence[int] | None = None,
    mode: Literal["official", "hardened", "both"] | None = None,
    timeout: float | None = None,
    min_level: Literal["limits", "paths", "namespaces"] = "paths",
    workers: int | None = None,
    local: bool = False,
    env: Mapping[str, Any] | None = None,
    tracking: str | None = None,
    progress: "Progress | None" = None,
    episodes: int | None = None,
    **writing: Any,
) -> BenchmarkResult | EpisodeScores:
    """Score a bundle's language models (`policy`), or ready samples (`samples`), on a benchmark; or, without a benchmark, a
    bundle's actor-critics on so many whole `episodes` of the environment that they were trained in.

    `benchmark` is a name or `jsonl:FILE`; `data` its file or URI; `k` the values of pass@k (all possible ones when None);
    `timeout` seconds for a program; `local` scores in this process, without Ray; `tracking` the MLflow URI that knows
    `models:/`. `writing` are options of samples that a policy writes: `agent`, `num_samples`, `seed`, `greedy`,
    `temperature`, `max_tokens`, `answer`, `prompt`. Benchmarks in a browser (`webarena`, `miniwob`) are played in this
    process; for them `policy` may be `expert`, `random` or `package.module:NAME`, `env` has the options of the environment,
    and `workers` is the number of episodes at a time. An evaluation that was cut short goes on in its folder `out`.

    Episodes without a benchmark take `seed`, `greedy`, `max_steps` and `env`, options of the environment that replace the
    run's; with one seed all bundles meet the same starts. Raises MarlRayError (a FieldError where one argument is wrong).
    """
    from marl_ray.evaluation.scoring.evaluate import EvaluationOptions
    from marl_ray.evaluation.web_agents.base import web_benchmark
    from marl_ray.sandbox import Level

    if benchmark is None or episodes is not None:
        others: dict[str, Any] = {
            "samples": samples,
            "data": data,
            "split": split,
            "sha256": sha256,
            "out": out,
            "k": k,
            "mode": mode,
        }
        others |= {"benchmark": benchmark, "timeout": timeout, "workers": workers, "local": local or None}
        others |= {"min_level": None if min_level == "paths" else min_level, "progress": progress}
        return _episodes(policy, episodes, others, {"env": env, "tracking": tracking, **writing})
    if unknown := writing.keys() - WRITING_OPTIONS:
        name = min(unknown)
        raise FieldError(name, f"is unknown{did_you_mean(name, WRITING_OPTIONS)}")
    if (web := web_benchmark(benchmark)) is not None:
        judging = {"samples": samples, "data": data, "sha256": sha256, "mode": mode, "timeout": timeout}
        judging["min_level"] = None if min_level == "paths" else min_level
        _only_in_browser(web, judging | {name: value for name, value in writing.items() if name not in WEB_OPTIONS})
        from marl_ray.evaluation.web_agents.evaluate import WebRequest, evaluate_web

        if policy is None:
            raise FieldError("policy", "expected a bundle, expert, random or package.module:NAME")
        request = WebRequest(
            str(policy),
            env=env or {},
            split=split or "test",
            overrides={name: writing.get(name) for name in ("temperature", "max_tokens")},
            ks=None if k is None else tuple(k),
            out=None if out is None else Path(out),
            workers=workers or len(os.sched_getaffinity(0)),
            tracking_uri=tracking_uri(tracking),
            **{name: writing[name] for name in ("agent", "num_samples", "seed", "greedy") if name in writing},
        )
        return BenchmarkResult(*evaluate_web(web, request, progress or _silent))
    if env is not None:
        raise FieldError("env", "expected with a benchmark in a browser")
    if (samples is None) == (policy is None):
        raise FieldError("policy", "expected either this, a bundle that writes samples, or `samples`, ready ones")
    if samples is not None and writing:
        raise FieldError(next(iter(writing)), "expected with a policy, not with ready samples")
    options = EvaluationOptions(
        benchmark,
        str(samples or ""),
        data,
        split,
        sha256,
        None if out is None else Path(out),
        None if k is None else tuple(k),
        mode,
        timeout,
        Level[min_level.upper()],
    )
    return _scored(options, policy, tracking, writing, workers, local, progress or _silent)


def _silent(counted: str, done: int, total: int) -> None:
    """Report no progress."""


def _scored(
    options: "EvaluationOptions",
    policy: str | Path | None,
    tracking: str | None,
    writing: Mapping[str, Any],
    workers: int | None,
    local: bool,
    progress: "Progress",
) -> BenchmarkResult:
    """Score the samples of `options` in the sandbox, or those that `policy` writes first."""
    from marl_ray.evaluation.scoring.evaluate import evaluate as score
    from marl_ray.evaluation.scoring.evaluate import possible_ks, prepare_evaluation, task_of
    from marl_ray.evaluation.writing.requests import SAMPLES, WritingRequest, generate

    task, description = task_of(options), ""
    if policy is None:
        planned = prepare_evaluation(options, task)
    with nullcontext() if local else ray_of_call():
        if policy is not None:
            # Writers may run on other machines, whose environment and folder are not these.
            request, problems = WritingRequest(str(policy), tracking_uri(tracking), **writing), task.data.problems
            possible_ks({problem.task_id: request.num_samples for problem in problems}, options.ks, ())
            facts = {"benchmark": task.benchmark.name, "data_sha256": task.data.sha256}
            with _writers(request, task, local) as source:
                folder, description = generate(source, request, problems, facts, options.out, progress)
            planned = prepare_evaluation(replace(options, samples=str(folder / SAMPLES), out=folder), task, description)
        report = score(planned, _scorer(workers, planned, local), progress)
    return BenchmarkResult(report, planned.folder)


def _episodes(
    policy: str | Path | None, episodes: int | None, others: Mapping[str, Any], options: Mapping[str, Any]
) -> EpisodeScores:
    """Return the whole episodes of a bundle. Raises FieldError for an argument that belongs to a benchmark."""
    if episodes is None:
        raise FieldError("benchmark", "expected a benchmark's name, or `episodes`, a number of whole ones to play")
    if given := [name for name, value in others.items() if value is not None]:
        raise FieldError(given[0], "expected none beside `episodes`")
    if policy is None:
        raise FieldError("policy", "expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS")
    return evaluate_episodes(policy, episodes, **options)


def _only_in_browser(benchmark: "WebBenchmark", given: Mapping[str, Any]) -> None:
    """Raise FieldError for an option that episodes in a browser do not have."""
    if others := [name for name, value in given.items() if value is not None]:
        raise FieldError(others[0], f"{benchmark.name} has none: it is played in a browser, whose options are `env`")


@contextmanager
def _writers(request: "WritingRequest", task: "ScoringTask", local: bool) -> Iterator["SampleWriter"]:
    if local:
        from marl_ray.evaluation.writing.writer import Writer

        yield Writer(request, task.benchmark)
        return
    from marl_ray.evaluation.writing.ray_writing import ray_writers

    with ray_writers(request, task.name) as source:
        yield source


@contextmanager
def _scorer(workers: int | None, planned: "EvaluationPlan", local: bool) -> Iterator["Scorer"]:
    if not local:
        from marl_ray.evaluation.scoring.ray_scoring import ray_scorer

        with ray_scorer(workers, planned.packages, planned.min_level) as scorer:
            yield scorer
        return
    from marl_ray.evaluation.scoring.local_scoring import make_pool, score_here

    count = workers or len(os.sched_getaffinity(0))
    with make_pool(count, planned.packages, planned.min_level) as pool:
        yield lambda jobs: score_here(pool, jobs, count)
