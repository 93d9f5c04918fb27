"""The last training episodes: what a run reports and selects its best checkpoint by."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from marl_ray.config import RunConfig
from marl_ray.rollout.collector import Episode

OVER_BUDGET = 1e6
"""Score lost per relative violation: a team within its budgets beats every one that is not."""


class Recent:
    """The last `evaluation.window` episodes of all workers."""

    def __init__(self, config: RunConfig, saved: Iterable[Any] = ()):
        self.constraints = config.constraints
        episodes = ((float(ret), tuple(costs), int(length)) for ret, costs, length in saved)
        self.episodes: deque[tuple[float, tuple[float, ...], int]] = deque(episodes, config.evaluation.window)

    def add(self, episodes: Iterable[Episode]) -> None:
        self.episodes.extend((episode.ret, episode.costs, episode.length) for episode in episodes)

    def state(self) -> list[Any]:
        """Plain data for a checkpoint."""
        return [[ret, list(costs), length] for ret, costs, length in self.episodes]

    def metrics(self) -> dict[str, float]:
        """Means over the window, and the share of its episodes within every budget; nothing before the first episode."""
        if not self.episodes:
            return {}
        count = len(self.episodes)
        found = {"return": sum(ret for ret, _, _ in self.episodes) / count}
        means = self._costs()
        names = ["episode_cost"] if len(means) == 1 else [f"episode_cost_{k}" for k in range(len(means))]
        found |= dict(zip(names, means, strict=True))
        found["episode_length"] = sum(length for _, _, length in self.episodes) / count
        if self.constraints:
            budgets = [constraint.budget for constraint in self.constraints]
            within = sum(all(c <= d for c, d in zip(costs, budgets, strict=True)) for _, costs, _ in self.episodes)
            found["within_budget"] = within / count
        return found

    def score(self) -> float:
        """What the best checkpoint is chosen by: the return, and before that keeping the budgets."""
        if not self.episodes:
            return float("-inf")
        over = 0.0
        for constraint, mean in zip(self.constraints, self._costs(), strict=False):
            over += max(0.0, (mean - constraint.budget) / max(constraint.budget, 1.0))
        return self.metrics()["return"] - OVER_BUDGET * over

    def _costs(self) -> list[float]:
        columns = zip(*(costs for _, costs, _ in self.episodes), strict=True)
        return [sum(column) / len(self.episodes) for column in columns]
