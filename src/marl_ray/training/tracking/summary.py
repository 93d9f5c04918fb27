"""Summarise a run in lines for people."""

from collections.abc import Callable, Mapping, Sequence

from marl_ray.algorithms.constraints.budgets import WIDER_BUDGET_FACTOR, budget_score, violation
from marl_ray.config import RunConfig

EPISODE_SOURCES = {"best/": ", on fresh episodes", "eval/": ", in its evaluation", "": " (training episodes)"}
"""Prefix of a metric -> whose episodes it is of. Evaluations choose the best weights, which flatters them there, so these
play fresh episodes too."""


def budget_texts(config: RunConfig, metrics: Mapping[str, float], prefix: str) -> list[str]:
    """Return texts such as `cost 29.81 of 30`, numbered if there are several budgets; [] without known costs."""
    costs = _mean_costs(config, metrics, prefix)
    names = ["cost"] if len(costs) == 1 else [f"cost {k}" for k in range(len(costs))]
    pairs = zip(names, costs, config.budgets, strict=False)
    return [f"{name} {cost:.2f} of {budget:g}" for name, cost, budget in pairs]


def evaluation_text(metrics: Mapping[str, float]) -> str:
    """Return the return of an evaluation's drawn actions, and that of its greedy ones where it differs."""
    drawn, greedy = f"{metrics['eval/return']:.3f}", metrics.get("eval/greedy_return")
    return drawn if greedy is None or f"{greedy:.3f}" == drawn else f"{drawn} (greedy {greedy:.3f})"


def run_summary(config: RunConfig, best: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    """Return the lines about the best policy and the last one.

    The lines have the costs and budgets if the run has constraints. `best` are the metrics of the iteration whose
    weights are the best bundle, `last` those of the last iteration.
    """
    lines = []
    best_prefix = "best/" if "best/return" in best else ""
    same_weights = best.get("steps", 0) == last.get("steps", 1) and best_prefix == "best/"
    for name, metrics, prefix in (
        ("best", best, best_prefix),
        ("last", last, "eval/" if "eval/return" in last else ""),
    ):
        if f"{prefix}return" not in metrics:
            continue
        shown = evaluation_text(metrics) if prefix == "eval/" else f"{metrics[f'{prefix}return']:.3f}"
        figures = [f"return {shown}", *budget_texts(config, metrics, prefix)]
        if name == "last":
            figures += [
                f"{key.replace('/', ' ')} {metrics[key]:.2f}" for key in metrics if f"/{key}".endswith("/entropy")
            ]
        at = f" at step {metrics['steps']:,.0f}" if "steps" in metrics else ""
        at += EPISODE_SOURCES[prefix]
        at += ", the same weights" if same_weights and name == "last" else ""
        lines.append(f"{name}    {', '.join(figures)}{at}")
        lines += [f"        {line}" for line in _within_budget_texts(metrics, prefix)]
    chosen_by = _mean_costs(config, best, "eval/" if "eval/return" in best else "")
    if chosen_by and violation(config.budgets, chosen_by) > 0:
        lines.append("no evaluated policy was within the budgets; the best is the one nearest to them")
    return lines


def benchmark_lines(config: RunConfig, history: Callable[[str], Sequence[tuple[int, float]]]) -> list[str]:
    """Return a line for each benchmark: the first pass@1 and the last, and its failures.

    The numbers are from the logged `history` of a metric.
    """
    lines = []
    for benchmark in config.evaluation.benchmarks:
        key = f"benchmark/{benchmark.metric}/"
        values, low, high = (history(f"{key}pass_at_1{part}") for part in ("", "_low", "_high"))
        failures = [step for step, _ in history(f"{key}failed")]
        parts = []
        if values:
            interval = f"{low[-1][1]:.3f} to {high[-1][1]:.3f}"
            parts.append(
                f"pass@1 {values[-1][1]:.3f} ({interval}) at step {values[-1][0]:,}, {values[0][1]:.3f} at first"
            )
        if failures:
            parts.append(f"not measured at step {', '.join(f'{step:,}' for step in failures)}")
        lines.append(f"{benchmark.metric}    {'; '.join(parts)}")
    return lines


def best_score_of(config: RunConfig, metrics: Mapping[str, float]) -> float | None:
    """Return the number by which the best bundles of several runs are compared.

    The number is the return, less the violations of budgets. `metrics` are those of the iteration of this run's best
    bundle. If the bundle was evaluated, the number is measured on other episodes than those that chose it, otherwise on
    training episodes; None if nothing was played.
    """
    best_return = metrics.get("best/return")
    if best_return is None:
        return metrics.get("return")
    costs = [metrics[f"best/episode_cost_{k}"] for k in range(len(config.budgets))]
    return budget_score(config.budgets, best_return, costs)


def _mean_costs(config: RunConfig, metrics: Mapping[str, float], prefix: str) -> list[float]:
    """Return the mean costs of an episode by budget; empty where they are not known."""
    count = len(config.budgets)
    single = f"{prefix}episode_cost"
    if count == 1 and single in metrics:
        return [metrics[single]]
    names = [f"{single}_{k}" for k in range(count)]
    return [metrics[name] for name in names] if all(name in metrics for name in names) else []


def _within_budget_texts(metrics: Mapping[str, float], prefix: str) -> list[str]:
    """Return the shares of the episodes that kept the budgets, as text."""
    shares = []
    for key, limit in (
        ("within_budget", "the budget"),
        ("within_budget_105", f"{WIDER_BUDGET_FACTOR:g} times the budget"),
    ):
        share, least = metrics.get(f"{prefix}{key}"), metrics.get(f"{prefix}{key}_certified")
        if share is not None:
            sure = "" if least is None else f" (at least {least:.1%} with 95 % confidence)"
            shares.append(f"{share:.1%} of episodes within {limit}{sure}")
    return shares
