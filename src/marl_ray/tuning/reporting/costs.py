"""Costs of a trial's policies against their budgets, and a summary of its best bundle.

The costs are those of each seed's last evaluation.
"""

from collections.abc import Mapping, Sequence

from marl_ray.algorithms.constraints.budgets import violation
from marl_ray.config import RunConfig
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.training.tracking.summary import run_summary

MetricRows = Sequence[Mapping[str, float]]


def seed_metrics(rows: MetricRows, seed: int, prefix: str) -> dict[str, float]:
    """Return the last reported metrics of a seed that begin with `prefix`, with their `steps`; {} if there are none."""
    for row in reversed(rows):
        seed_prefix = f"seed-{seed}/"
        own_metrics = {key: value for key, value in row.items() if key.startswith(seed_prefix + prefix)}
        metrics = {key.removeprefix(seed_prefix): value for key, value in own_metrics.items()}
        if metrics:
            return {"steps": row["steps"]} | metrics
    return {}


def budgets_of(configs: Sequence[JsonMapping]) -> list[float]:
    """Return the budgets in a trial's run configs (one config per seed, all with the same budgets)."""
    constraints = configs[0].get("constraints", ()) if configs else ()
    return [float(constraint["budget"]) for constraint in constraints]


def cost_cells(rows: MetricRows, seeds: Sequence[int], budgets: Sequence[float]) -> list[JsonObject]:
    """Return, for each budget, the least and the greatest mean cost among the seeds; [] while a seed has no cost."""
    last = [seed_metrics(rows, seed, "eval/") for seed in seeds]
    cells = []
    for k, budget in enumerate(budgets):
        costs = [metrics[f"eval/episode_cost_{k}"] for metrics in last if f"eval/episode_cost_{k}" in metrics]
        if len(costs) < len(seeds):
            return []
        cells.append(
            {"low": min(costs), "high": max(costs), "budget": budget, "over": violation([budget], [max(costs)]) > 0}
        )
    return cells


def share_cells(rows: MetricRows, seeds: Sequence[int]) -> list[dict[str, float]]:
    """Return the worst seed's shares of episodes within 1.00 and 1.05 of the budgets, and their certified bounds."""
    last = [seed_metrics(rows, seed, "eval/within") for seed in seeds]
    if not all(last):
        return []
    names = ("within_budget", "within_budget_105")
    return [
        {"share": min(f[f"eval/{name}"] for f in last), "least": min(f[f"eval/{name}_certified"] for f in last)}
        for name in names
    ]


def seed_summary(rows: MetricRows, config: JsonMapping) -> list[str]:
    """Return the lines about the best bundle of a seed and its last policy; [] if nothing was evaluated."""
    seed = int(config["seed"])
    best, last = seed_metrics(rows, seed, "best/"), seed_metrics(rows, seed, "eval/")
    if not best:
        return []
    # The row also has the evaluation by which the bundle was chosen.
    at = next(row for row in reversed(rows) if f"seed-{seed}/best/return" in row)
    best |= seed_metrics([at], seed, "eval/")
    return run_summary(RunConfig.model_validate(config), best, last)
