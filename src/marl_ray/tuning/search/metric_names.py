"""The names of the metrics that a run reports, as far as its config says.

A sweep that compares another metric would fail late.
"""

from collections.abc import Iterator

from marl_ray.config import RunConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.evaluation.pass_at_k import values_of_k

UPDATE_METRICS = (
    "policy_loss",
    "value_loss",
    "cost_value_loss",
    "entropy",
    "kl",
    "clip_fraction",
    "grad_norm",
    "explained_variance",
    "reference_kl",
    "trust_region_kl",
    "trust_region_case",
    "line_search_steps",
    "group_std",
    "informative_groups",
    "left_out",
    "engine/log_prob_gap",
)
"""Metrics of a policy's update, whatever its algorithm, besides its multipliers."""
CLOCK_METRICS = ("steps", "iteration", "steps_per_second", "time/rollout", "time/update", "time/other")
"""Metrics of every row: progress, speed, and the seconds of an iteration's parts."""
INTERVAL_METRICS = ("return_low", "return_high")
"""Metrics of an evaluation of several starts: the interval of the mean return."""
BUDGET_METRICS = ("within_budget", "within_budget_105")
"""Metrics of a run with constraints: shares of episodes within 1.00 and 1.05 of all budgets."""
TEXT_METRICS = ("tokens", "prompt_tokens", "tokens_per_second")
"""Metrics of a run with language models."""
AGENT_METRICS = ("reward", "response_tokens", "ended", "prompt_shortened", "prompt_too_long", "refused")
"""Metrics of an agent that writes texts, behind its name."""
ENVIRONMENT_PREFIXES = ("env/", "eval/env/", "best/env/")
"""Prefixes of the metrics whose names the environment chooses."""


def check_metrics(sweep: SweepConfig, run: RunConfig) -> None:
    """Refuse a metric that the run cannot report. Raises MarlRayError with the names that are close."""
    names = list(metric_names(run))
    for metric in sweep.metric:
        kind, _, rest = metric.name.partition("/")
        if kind == "benchmark":
            if rest.partition("/")[0] not in [settings.metric for settings in run.evaluation.benchmarks]:
                raise MarlRayError(f"metric: {metric.name} needs an entry of run.evaluation.benchmarks of that name")
            continue
        if metric.name.startswith(ENVIRONMENT_PREFIXES) or (run.has_language_models and _is_of_texts(run, metric.name)):
            continue
        if metric.name not in names:
            raise MarlRayError(f"metric: no run reports {metric.name!r}{did_you_mean(metric.name, names)}")
        if kind in ("eval", "best") and not run.has_evaluations:
            raise MarlRayError(
                f"metric: {metric.name} needs evaluations, and the run has none; set run.evaluation.every, "
                "or give another metric, such as return"
            )


def _is_of_texts(run: RunConfig, name: str) -> bool:
    """Return True for a metric of one agent, whose name the environment has, and for one of the run's `data`."""
    return name.rpartition("/")[2] in AGENT_METRICS or (run.data is not None and name.startswith("data/"))


def unchecked_metrics(sweep: SweepConfig) -> list[str]:
    """Return the metrics whose names only the environment knows.

    The first trial shows whether it reports them.
    """
    return [metric.name for metric in sweep.metric if metric.name.startswith(ENVIRONMENT_PREFIXES)]


def metric_names(run: RunConfig) -> Iterator[str]:
    """Yield the names of a run's metrics, but for those that an environment chooses."""
    trained = [name for name, policy in run.team.items() if not policy.frozen]
    costs = ["episode_cost"] if run.cost_signals == 1 else [f"episode_cost_{k}" for k in range(run.cost_signals)]
    shares = BUDGET_METRICS if run.budgets else ()
    yield from ("return", "episode_length", *costs, *shares, "score")
    # Episodes that choose nothing, those of `best/`, are all sampled.
    yield from ("eval/greedy_return", *(("eval/greedy",) if run.has_language_models else ()), "best/steps")
    for prefix in ("eval/", "best/"):
        yield from (f"{prefix}{name}" for name in _evaluation_names(run))
    for name in trained:
        prefix = "" if len(trained) == 1 else f"{name}/"
        yield from (f"{prefix}{metric}" for metric in UPDATE_METRICS)
        yield from (f"{prefix}multiplier_{k}" for k in range(len(run.budgets)))
    yield from (
        *CLOCK_METRICS,
        "time/evaluation",
        "time/benchmarks",
        *(TEXT_METRICS if run.has_language_models else ()),
    )


def _evaluation_names(run: RunConfig) -> Iterator[str]:
    """Yield the names of the metrics of an evaluation's sampled episodes."""
    starts = run.evaluation.tasks if run.has_language_models else run.evaluation_episodes
    yield from ("return", "episode_length", *(INTERVAL_METRICS if starts > 1 else ()))
    if len(run.team) > 1:
        yield from (f"return/{name}" for name in run.team)
    if run.budgets:
        yield from (f"episode_cost_{k}" for k in range(len(run.budgets)))
        yield from (f"{share}{end}" for share in BUDGET_METRICS for end in ("", "_certified"))
    if run.has_language_models:
        yield from (f"pass_at_{k}" for k in values_of_k(run.evaluation.samples))
    else:
        yield "cut"  # the share of truncated episodes
