"""The names of the metrics that a run reports, as far as its config says.

A sweep that compares another metric would fail late.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from marl_ray.config import RunConfig, engine_spec
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.evaluation.pass_at_k import values_of_k


class Need(NamedTuple):
    """A condition on a run under which the update of a policy reports a metric."""

    text: str
    is_met: Callable[[RunConfig, str], bool]
    """Run and name of a trained policy -> True if the update reports it."""


CRITIC = Need("an algorithm with a critic", lambda run, name: run.spec_of(name).critic != "none")
TRAINED_CRITIC = Need(
    "an algorithm that trains its critic beside the actor",
    lambda run, name: run.spec_of(name).critic != "none" and not run.spec_of(name).critic_first,
)
COST_CRITICS = Need("an algorithm that keeps budgets", lambda run, name: run.spec_of(name).needs_costs)
KL_COEF = Need("hyper.kl_coef above 0", lambda run, name: bool(run.hyper_of(name).kl_coef))
TRUST_REGION = Need(
    "an algorithm with a trust region", lambda run, name: run.spec_of(name).constraint == "trust_region"
)
GROUPS = Need(
    "an algorithm that compares the sampled members of groups",
    lambda run, name: run.spec_of(name).groups and not run.spec_of(name).greedy,
)
TEXT_GROUPS = Need(
    "language models and an algorithm that compares the members of groups",
    lambda run, name: run.has_language_models and run.spec_of(name).groups,
)
MULTIPLIERS = Need(
    "an algorithm with Lagrange multipliers", lambda run, name: run.spec_of(name).constraint == "multiplier"
)
OTHER_ENGINE = Need(
    "an engine that computes with modules of its own, such as vllm",
    lambda run, name: (
        run.has_language_models and run.data is None and not engine_spec(run.team[name].generation.engine).same_modules
    ),
)
UPDATE_METRICS: dict[str, Need | None] = {
    "policy_loss": None,
    "value_loss": CRITIC,
    "cost_value_loss": COST_CRITICS,
    "entropy": None,
    "kl": None,
    "clip_fraction": None,
    "grad_norm": None,
    "explained_variance": TRAINED_CRITIC,
    "reference_kl": KL_COEF,
    "trust_region_kl": TRUST_REGION,
    "trust_region_case": TRUST_REGION,
    "line_search_steps": TRUST_REGION,
    "group_std": GROUPS,
    "informative_groups": GROUPS,
    "left_out": TEXT_GROUPS,
    "engine/log_prob_gap": OTHER_ENGINE,
}
"""Metric of a policy's update, besides its multipliers -> its condition; None if every update reports it."""
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
        if kind in ("eval", "best") and not run.has_evaluations:
            raise MarlRayError(
                f"metric: {metric.name} needs evaluations, and the run has none; set run.evaluation.every, "
                "or give a metric of the training"
            )
        if metric.name not in names and not _has_name_of_environment(run, metric.name):
            need = missing_need(run, metric.name)
            if need:
                raise MarlRayError(f"metric: not every run of the sweep reports {metric.name!r}, which needs {need}")
            raise MarlRayError(f"metric: no run reports {metric.name!r}{did_you_mean(metric.name, names)}")


def missing_need(run: RunConfig, name: str) -> str:
    """Return what the run lacks so that it reports a metric; empty if the metric is unknown."""
    measures = {"time/evaluation": "evaluations", "time/benchmarks": "run.evaluation.benchmarks"}
    if name in measures:
        return measures[name]
    for policy, prefix in _prefixes(run).items():
        need = _update_needs(run).get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if need is not None and not need.is_met(run, policy):
            return need.text
    return ""


def _has_name_of_environment(run: RunConfig, name: str) -> bool:
    """Return True for a metric whose name the environment chooses, and for one of an agent that writes texts."""
    if name.startswith("env/") and run.data is not None:
        return False
    of_agent = run.has_language_models and name.rpartition("/")[2] in AGENT_METRICS
    return of_agent or name.startswith(ENVIRONMENT_PREFIXES)


def unchecked_metrics(sweep: SweepConfig) -> list[str]:
    """Return the metrics whose names only the environment knows.

    The first trial shows whether it reports them.
    """
    return [metric.name for metric in sweep.metric if metric.name.startswith(ENVIRONMENT_PREFIXES)]


def metric_names(run: RunConfig) -> Iterator[str]:
    """Yield the names of a run's metrics, but for those that an environment chooses."""
    if run.data is None:  # else nothing is played but evaluations
        costs = ["episode_cost"] if run.cost_signals == 1 else [f"episode_cost_{k}" for k in range(run.cost_signals)]
        yield from ("return", "episode_length", *costs, *(BUDGET_METRICS if run.budgets else ()))
    if run.data is None or run.has_evaluations:
        yield "score"
    # Episodes that choose nothing, those of `best/`, are all sampled.
    yield from ("eval/greedy_return", *(("eval/greedy",) if run.has_language_models else ()), "best/steps")
    for prefix in ("eval/", "best/"):
        yield from (f"{prefix}{name}" for name in _evaluation_names(run))
    for name, prefix in _prefixes(run).items():
        needs = _update_needs(run).items()
        yield from (f"{prefix}{metric}" for metric, need in needs if need is None or need.is_met(run, name))
        if run.data is not None:
            yield f"data/{name}/passes"
    yield from CLOCK_METRICS
    if run.has_evaluations:
        yield "time/evaluation"
    if run.evaluation.benchmarks:
        yield "time/benchmarks"
    if run.has_language_models:
        yield from TEXT_METRICS


def _update_needs(run: RunConfig) -> dict[str, Need | None]:
    """Return metric of a policy's update -> its condition, as `UPDATE_METRICS`, with a multiplier for each budget."""
    return UPDATE_METRICS | {f"multiplier_{k}": MULTIPLIERS for k in range(len(run.budgets))}


def _prefixes(run: RunConfig) -> dict[str, str]:
    """Return trained policy -> the beginning of the names of its update's metrics."""
    trained = run.trained_policies
    return {name: "" if len(trained) == 1 else f"{name}/" for name in trained}


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
        yield "truncated"
