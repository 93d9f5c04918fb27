"""`marl_ray.evaluate`: a bundle's policies, or ready samples, on a benchmark; or whole episodes of a bundle."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from marl_ray.api.calls import ray_of_call, short_interrupt
from marl_ray.api.episodes import MAX_STEPS, SEED, EpisodeScores, evaluate_episodes
from marl_ray.config import resolve_tracking_uri
from marl_ray.errors import FieldError, did_you_mean

if TYPE_CHECKING:
    from marl_ray.evaluation.benchmarks import Kind
    from marl_ray.evaluation.scoring.evaluate import EvaluationOptions, EvaluationPlan, Progress, ScoringTask
    from marl_ray.evaluation.scoring.local_scoring import Scorer
    from marl_ray.evaluation.web_agents.base import WebBenchmark
    from marl_ray.evaluation.writing.requests import SampleWriter, WritingRequest

R = TypeVar("R")
ScoringMode: TypeAlias = Literal["official", "hardened", "both"]
SandboxLevel: TypeAlias = Literal["limits", "paths", "namespaces"]


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
    k: Sequence[int] | None = None,
    mode: ScoringMode | None = None,
    timeout: float | None = None,
    min_level: SandboxLevel | None = None,
    workers: int | None = None,
    local: bool = False,
    env: Mapping[str, Any] | None = None,
    tracking_uri: str | None = None,
    progress: "Progress | None" = None,
    agent: str | None = None,
    num_samples: int | None = None,
    seed: int | None = None,
    greedy: bool = False,
    temperature: float | None = None,
    max_tokens: int | None = None,
    answer: "Kind | None" = None,
    prompt: str | None = None,
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
    tracking_uri: str | None = None,
) -> EpisodeScores: ...
@short_interrupt()
def evaluate(
    benchmark: str | None = None,
    policy: str | Path | None = None,
    samples: str | Path | None = None,
    **options: Any,
) -> BenchmarkResult | EpisodeScores:
    """Score a bundle or ready samples on a benchmark, or a bundle on whole episodes.

    With a `benchmark`, a name or `jsonl:FILE`, it scores a bundle's language models (`policy`) or ready samples
    (`samples`); without one, a bundle's actor-critics on so many whole `episodes` of the environment that they were
    trained in. Each kind of evaluation has its own options and refuses those of the others; one that is None or False
    counts as not given. An interrupted evaluation is resumed from its folder `out`.

    data, split, sha256: file or URI of the problems, part of them, and digest to expect.
    k: values of pass@k; all possible ones by default.
    mode: `official`, `hardened` or `both`; all that the benchmark has by default.
    timeout: seconds for a program.
    min_level: weakest acceptable sandbox: `limits`, `paths` (by default) or `namespaces`.
    workers: programs at a time on a machine; in a browser, episodes at a time.
    local: score in this process, without Ray. Benchmarks in a browser (`webarena`, `miniwob`) always run so.
    tracking_uri: MLflow URI that knows `models:/`.
    progress: function of what is counted, the number done and the total.
    agent, num_samples, seed, greedy, temperature, max_tokens, answer, prompt: options of samples that a policy writes. In a
    browser all but the last two; there `policy` may also be `expert`, `random` or `package.module:NAME`.
    env: options of a browser's environment; with `episodes`, options that replace the run's.
    seed, greedy, max_steps: options of `episodes`. With one seed all bundles meet the same starts.

    Raises MarlRayError (a FieldError where one argument is wrong).
    """
    options |= {"benchmark": benchmark, "policy": policy, "samples": samples}
    arguments = {name: value for name, value in options.items() if value is not None and value is not False}
    if "episodes" in arguments:
        if policy is None:
            raise FieldError("policy", "expected a bundle's folder, models:/NAME/VERSION or models:/NAME@ALIAS")
        return _call(evaluate_episodes, arguments, "expected none beside `episodes`")
    if benchmark is None:
        raise FieldError("benchmark", "expected a benchmark's name, or `episodes`, a number of whole ones to play")
    from marl_ray.evaluation.web_agents.base import web_benchmark

    if (web := web_benchmark(benchmark)) is not None:
        if policy is None:
            raise FieldError("policy", "expected a bundle, expert, random or package.module:NAME")
        refusal = f"{web.name} has none: it is played in a browser, whose options are `env`"
        return _call(_browser_benchmark, arguments | {"benchmark": web}, refusal)
    if (samples is None) == (policy is None):
        raise FieldError("policy", "expected a bundle, which writes samples, or ready samples by --samples (samples=)")
    if samples is not None:
        return _call(_ready_samples, arguments, "expected with a policy, not with ready samples")
    return _call(_written_samples, arguments, "expected with a benchmark in a browser, or with `episodes`")


def _call(kind: Callable[..., R], arguments: Mapping[str, Any], refusal: str) -> R:
    """Call the function of one kind of evaluation.

    Raises FieldError for an argument that it does not take; the message is `refusal` if another kind takes it.
    """
    parameters = inspect.signature(kind).parameters
    for name in arguments:
        if name not in parameters:
            known = any(name in inspect.signature(other).parameters for other in _KINDS)
            raise FieldError(name, refusal if known else f"is unknown{did_you_mean(name, parameters)}")
    return kind(**arguments)


def _browser_benchmark(
    benchmark: "WebBenchmark",
    policy: str | Path,
    env: Mapping[str, Any] | None = None,
    split: str = "test",
    out: str | Path | None = None,
    k: Sequence[int] | None = None,
    workers: int | None = None,
    local: bool = True,
    tracking_uri: str | None = None,
    progress: "Progress | None" = None,
    agent: str | None = None,
    num_samples: int = 1,
    seed: int = 0,
    greedy: bool = False,
    temperature: float | None = None,
    max_tokens: int | None = None,
) -> BenchmarkResult:
    """Play a benchmark in browsers that this process starts, with or without `local`."""
    from marl_ray.evaluation.web_agents.evaluate import WebRequest, evaluate_web

    request = WebRequest(
        str(policy),
        agent=agent,
        env=env or {},
        split=split,
        num_samples=num_samples,
        seed=seed,
        greedy=greedy,
        overrides={"temperature": temperature, "max_tokens": max_tokens},
        ks=None if k is None else tuple(k),
        out=None if out is None else Path(out),
        workers=workers or len(os.sched_getaffinity(0)),
        tracking_uri=resolve_tracking_uri(tracking_uri),
    )
    return BenchmarkResult(*evaluate_web(benchmark, request, progress or _silent))


def _ready_samples(
    benchmark: str,
    samples: str | Path,
    data: str | None = None,
    split: str | None = None,
    sha256: str | None = None,
    out: str | Path | None = None,
    k: Sequence[int] | None = None,
    mode: ScoringMode | None = None,
    timeout: float | None = None,
    min_level: SandboxLevel = "paths",
    workers: int | None = None,
    local: bool = False,
    progress: "Progress | None" = None,
) -> BenchmarkResult:
    """Score the samples of a file."""
    from marl_ray.evaluation.scoring.evaluate import prepare_evaluation

    options = _options(benchmark, data, split, sha256, out, k, mode, timeout, min_level)
    plan = prepare_evaluation(replace(options, samples=str(samples)))
    with nullcontext() if local else ray_of_call():
        return _score_plan(plan, workers, local, progress or _silent)


def _written_samples(
    benchmark: str,
    policy: str | Path,
    data: str | None = None,
    split: str | None = None,
    sha256: str | None = None,
    out: str | Path | None = None,
    k: Sequence[int] | None = None,
    mode: ScoringMode | None = None,
    timeout: float | None = None,
    min_level: SandboxLevel = "paths",
    workers: int | None = None,
    local: bool = False,
    tracking_uri: str | None = None,
    progress: "Progress | None" = None,
    agent: str | None = None,
    num_samples: int = 1,
    seed: int = 0,
    greedy: bool = False,
    temperature: float | None = None,
    max_tokens: int | None = None,
    answer: "Kind | None" = None,
    prompt: str | None = None,
) -> BenchmarkResult:
    """Let a bundle's policies write samples, and score these."""
    from marl_ray.evaluation.scoring.evaluate import possible_ks, prepare_evaluation, task_of
    from marl_ray.evaluation.writing.requests import SAMPLES, WritingRequest, generate

    options = _options(benchmark, data, split, sha256, out, k, mode, timeout, min_level)
    task, progress = task_of(options), progress or _silent
    with nullcontext() if local else ray_of_call():
        request = WritingRequest(
            str(policy),
            # Writers may run on other machines, whose environment and folder are not these.
            tracking_uri=resolve_tracking_uri(tracking_uri),
            agent=agent,
            num_samples=num_samples,
            seed=seed,
            greedy=greedy,
            temperature=temperature,
            max_tokens=max_tokens,
            answer=answer,
            prompt=prompt,
        )
        problems = task.data.problems
        possible_ks({problem.task_id: num_samples for problem in problems}, options.ks, ())
        facts = {"benchmark": task.benchmark.name, "data_sha256": task.data.sha256}
        with _writers(request, task, local) as source:
            folder, description = generate(source, request, problems, facts, options.out, progress)
        options = replace(options, samples=str(folder / SAMPLES), out=folder)
        return _score_plan(prepare_evaluation(options, task, description), workers, local, progress)


_KINDS: tuple[Callable[..., Any], ...] = (evaluate_episodes, _browser_benchmark, _ready_samples, _written_samples)
"""The kinds of evaluation. The parameters of each are the arguments that `evaluate` takes for it."""


def _options(
    benchmark: str,
    data: str | None,
    split: str | None,
    sha256: str | None,
    out: str | Path | None,
    k: Sequence[int] | None,
    mode: ScoringMode | None,
    timeout: float | None,
    min_level: SandboxLevel,
) -> "EvaluationOptions":
    """Make the options of scoring, without the samples."""
    from marl_ray.evaluation.scoring.evaluate import EvaluationOptions
    from marl_ray.sandbox import Level

    return EvaluationOptions(
        benchmark=benchmark,
        data=data,
        split=split,
        sha256=sha256,
        out=None if out is None else Path(out),
        ks=None if k is None else tuple(k),
        mode=mode,
        timeout_s=timeout,
        min_level=Level[min_level.upper()],
    )


def _score_plan(plan: "EvaluationPlan", workers: int | None, local: bool, progress: "Progress") -> BenchmarkResult:
    """Score the samples of a plan in the sandbox."""
    from marl_ray.evaluation.scoring.evaluate import evaluate as score

    return BenchmarkResult(score(plan, _scorer(workers, plan, local), progress), plan.folder)


def _silent(counted: str, done: int, total: int) -> None:
    """Report no progress."""


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
def _scorer(workers: int | None, plan: "EvaluationPlan", local: bool) -> Iterator["Scorer"]:
    if not local:
        from marl_ray.evaluation.scoring.ray_scoring import ray_scorer

        with ray_scorer(workers, plan.packages, plan.min_level) as scorer:
            yield scorer
        return
    from marl_ray.evaluation.scoring.local_scoring import make_pool, score_locally

    count = workers or len(os.sched_getaffinity(0))
    with make_pool(count, plan.packages, plan.min_level) as pool:
        yield lambda jobs: score_locally(pool, jobs, count)
