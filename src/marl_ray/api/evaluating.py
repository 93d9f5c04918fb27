"""`marl_ray.evaluate`: the scores of a bundle or of ready samples, on a benchmark or on whole episodes."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from marl_ray.api.calls import check_known, ray_of_call, short_interrupt
from marl_ray.api.episodes import EpisodeScores, evaluate_episodes
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
from marl_ray.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from marl_ray.evaluation.benchmarks import AnswerKind
    from marl_ray.evaluation.scoring.evaluate import EvaluationPlan, ScoringTask
    from marl_ray.evaluation.scoring.local import Scorer
    from marl_ray.evaluation.web_agents.base import WebBenchmark
    from marl_ray.evaluation.writing.requests import SampleWriter
    from marl_ray.sandbox import Level

_RECORD_TYPES: tuple[type, ...] = (EpisodeOptions, WebRequest, ScoringOptions, WritingRequest, RunningOptions)
"""Dataclasses whose fields are the options of `evaluate`."""
_OPTIONS = sorted({field.name for record in _RECORD_TYPES for field in dataclasses.fields(record)})
"""All options of `evaluate`."""
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
    data: str | None = None,
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

    data, split, sha256: file or URI of the problems, part of them, and digest to expect. k: value or values of pass@k; all
    possible ones by default. mode: `official`, `hardened` or `both`; all that the benchmark has by default. timeout_s:
    seconds for a program. min_level: weakest acceptable sandbox: `limits`, `paths` (by default) or `namespaces`.
    workers: programs at a time on a machine; in a browser, episodes at a time. local: score in this process, without
    Ray. Benchmarks in a browser (`webarena`, `miniwob`) always run so. tracking_uri: MLflow URI that knows `models:/`.
    progress: function of what is counted, the number done and the total. agent, num_samples, seed, greedy, temperature,
    max_tokens, answer, prompt: options of samples that a policy writes. In a browser all but the last two; there
    `policy` may also be `expert`, `random` or `package.module:NAME`. env: options of a browser's environment; with
    `episodes`, options that replace the run's. seed, greedy, max_steps: options of `episodes`. With one seed all
    bundles meet the same starts.

    Raises MarlRayError (a FieldError where one argument is wrong).
    """
    from marl_ray.evaluation.web_agents.base import web_benchmark

    for name in options:
        check_known(name, _OPTIONS)
    arguments = _convert_options(options | {"benchmark": benchmark, "policy": policy, "samples": samples})
    if "episodes" in arguments:
        if policy is None:
            raise FieldError("policy", "expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS")
        return evaluate_episodes(*_make_records(arguments, (EpisodeOptions,), "expected none beside `episodes`"))
    if benchmark is None:
        raise FieldError("benchmark", "expected a benchmark's name, or `episodes`, a number of whole ones to play")
    if (web := web_benchmark(benchmark)) is not None:
        if policy is None:
            raise FieldError("policy", "expected a bundle, expert, random or package.module:NAME")
        del arguments["benchmark"]
        refusal = f"{web.name} has none: it is played in a browser, whose options are `env`"
        return _play_in_browser(web, *_make_records(arguments, (WebRequest, RunningOptions), refusal))
    if (samples is None) == (policy is None):
        raise FieldError("policy", "expected a bundle, which writes samples, or ready samples by --samples (samples=)")
    if samples is not None:
        refusal = "expected with a policy, not with ready samples"
        return _score_ready_samples(*_make_records(arguments, (ScoringOptions, RunningOptions), refusal))
    refusal = "expected with a benchmark in a browser, or with `episodes`"
    return _score_written_samples(*_make_records(arguments, (ScoringOptions, WritingRequest, RunningOptions), refusal))


def _convert_options(options: JsonMapping) -> JsonObject:
    """Return the options that are neither None nor False, with values as the records hold them."""
    from marl_ray.sandbox import Level

    def level_of(level: object) -> Level:
        if isinstance(level, Level):
            return level
        if not isinstance(level, str) or level.upper() not in Level.__members__:
            raise FieldError("min_level", f"expected limits, paths or namespaces, got {level!r}")
        return Level[level.upper()]

    arguments = {name: value for name, value in options.items() if value is not None and value is not False}
    if not isinstance(arguments.get("benchmark", ""), str):
        raise FieldError("benchmark", f"expected a benchmark's name, got {arguments['benchmark']!r}")
    conversions: dict[str, Callable[[Any], Any]] = {
        "policy": str,
        "samples": str,
        "out": Path,
        "k": _tuple_of_ks,
        "min_level": level_of,
    }
    return {name: conversions[name](value) if name in conversions else value for name, value in arguments.items()}


def _tuple_of_ks(k: object) -> tuple[int, ...]:
    """Return the values of k, of which one may be given as it is."""
    ks = (k,) if isinstance(k, int) else k
    if not isinstance(ks, Sequence) or any(not isinstance(value, int) or isinstance(value, bool) for value in ks):
        raise FieldError("k", f"expected a whole number or a sequence of them, got {k!r}")
    return tuple(ks)


def _make_records(arguments: JsonMapping, kinds: Sequence[type], refusal: str) -> list[Any]:
    """Return the records of one kind of evaluation, made from its options.

    Raises FieldError with the `refusal` for an option that is a field of none of them.
    """
    fields = {kind: {field.name for field in dataclasses.fields(kind)} for kind in _RECORD_TYPES}
    accepted = set().union(*(fields[kind] for kind in kinds))
    for name in arguments:
        if name not in accepted:
            raise FieldError(name, refusal)
    return [kind(**{name: value for name, value in arguments.items() if name in fields[kind]}) for kind in kinds]


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
