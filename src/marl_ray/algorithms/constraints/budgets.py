"""Compare episodes with the budgets of a run.

The results are shares within them, certified bounds, and the score that chooses a policy. A policy keeps a budget if
its mean cost of an episode does not exceed it. That says nothing about single episodes, so the share of episodes within
the budget is reported beside the mean.
"""

from collections.abc import Sequence

OVER_BUDGET = 1e6
"""Score that is subtracted per relative violation. It is so large that a team within its budgets beats every team that
exceeds one."""
CONFIDENCE = 0.95
"""Probability that the true rate is at least the certified one."""
WIDER_BUDGET_FACTOR = 1.05
"""Episodes are also counted against budgets that are wider by this factor."""
_ROUNDING = 1e-6
"""Excess over a budget, in units of the budget (at least 1), that float32 sums of costs may have by rounding alone."""


def mean_costs(costs: Sequence[Sequence[float]]) -> list[float]:
    """Average the costs of each signal over episodes and return (K,) from (episodes, K)."""
    return [sum(column) / len(costs) for column in zip(*costs, strict=True)]


def violation(budgets: Sequence[float], costs: Sequence[float]) -> float:
    """Return by how much mean costs exceed their budgets, summed over the signals.

    The sum is 0 if all are within theirs. Each excess counts in units of its budget (at least 1); an excess that
    rounding explains does not count.
    """
    pairs = zip(budgets, costs, strict=False)  # without constraints a signal may have no budget
    over = [(cost - budget) / max(budget, 1.0) for budget, cost in pairs]
    return sum(part for part in over if part > _ROUNDING)


def budget_score(budgets: Sequence[float], episode_return: float, costs: Sequence[float]) -> float:
    """Return the number that chooses the best policy, greater for the better one.

    A smaller violation of the budgets counts first, then the greater return.
    """
    return episode_return - OVER_BUDGET * violation(budgets, costs)


def certified_rate(successes: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """Return the greatest p for which "the rate is at least p" holds with this confidence.

    This p is the one-sided bound of Clopper and Pearson (1934).
    """
    from scipy.special import betaincinv  # scipy is imported here, because every process of a run imports this file

    return float(betaincinv(successes, trials - successes + 1, 1 - confidence)) if successes else 0.0


def within_budget_metrics(budgets: Sequence[float], costs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Count the episodes within the budgets, given `costs` (episodes, signals), and return metrics.

    `within_budget` and `within_budget_105` are the shares of episodes whose costs are within 1.00 and 1.05 times every
    budget; `..._certified` is a lower bound of each share, with 95 % confidence.
    """
    metrics = {}
    for name, factor in (("within_budget", 1.0), ("within_budget_105", WIDER_BUDGET_FACTOR)):
        limits = [factor * budget + _ROUNDING * max(budget, 1.0) for budget in budgets]
        within = sum(all(c <= limit for c, limit in zip(episode_costs, limits, strict=True)) for episode_costs in costs)
        metrics[name] = within / len(costs)
        metrics[f"{name}_certified"] = certified_rate(within, len(costs))
    return metrics
