"""`marl_ray.evaluate`: the scores of a bundle or of ready samples, on a benchmark or on whole episodes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from marl_ray.api.calls import check_known, short_interrupt
from marl_ray.api.evaluating.arguments import OPTIONS, convert_options, make_records
from marl_ray.api.evaluating.benchmarks import (
    BenchmarkResult,
    play_in_browser,
    score_ready_samples,
    score_written_samples,
)
from marl_ray.api.evaluating.episodes import EpisodeScores, evaluate_episodes
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

if TYPE_CHECKING:
    from marl_ray.evaluation.benchmarks import AnswerKind
    from marl_ray.sandbox import Level

ScoringMode: TypeAlias = Literal["official", "hardened", "both"]
SandboxLevel: TypeAlias = Literal["limits", "paths", "namespaces"]


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
    - split: part of the problems; the benchmark's first by default, and in a browser the part `test`.
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
        return play_in_browser(web, *make_records(arguments, (WebRequest, RunningOptions), refusal))
    if (samples is None) == (policy is None):
        raise FieldError("policy", "expected a bundle, which writes samples, or `samples`, ready ones")
    if samples is not None:
        refusal = "expected with a policy, not with ready samples"
        return score_ready_samples(*make_records(arguments, (ScoringOptions, RunningOptions), refusal))
    refusal = "expected with a benchmark in a browser, or with `episodes`"
    return score_written_samples(*make_records(arguments, (ScoringOptions, WritingRequest, RunningOptions), refusal))
