"""The last training episodes: what a run reports and, where nothing is held out, selects its best checkpoint by."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from marl_ray.config import ConstraintConfig, RunConfig

OVER_BUDGET = 1e6
"""Score lost per relative violation: a team within its budgets beats every one that is not."""


class Played(Protocol):
    """What is read of a finished episode."""

    @property
    def ret(self) -> float: ...
    @property
    def costs(self) -> tuple[float, ...]: ...
    @property
    def length(self) -> int: ...
    @property
    def copy(self) -> int: ...
    @property
    def decisions(self) -> dict[str, int]: ...


def mean_costs(costs: Sequence[Sequence[float]]) -> list[float]:
    """Of each signal over episodes."""
    return [sum(column) / len(costs) for column in zip(*costs, strict=True)]


def score(constraints: Sequence[ConstraintConfig], ret: float, costs: Sequence[float]) -> float:
    """What the best checkpoint is chosen by: the return, and before that keeping the budgets."""
    over = 0.0
    for constraint, mean in zip(constraints, costs, strict=False):
        over += max(0.0, (mean - constraint.budget) / max(constraint.budget, 1.0))
    return ret - OVER_BUDGET * over


class Recent:
    """The last `evaluation.window` episodes of all workers."""

    def __init__(self, config: RunConfig, saved: Iterable[Any] = ()):
        self.constraints = config.constraints
        episodes = ((float(ret), tuple(costs), int(length)) for ret, costs, length in saved)
        self.episodes: deque[tuple[float, tuple[float, ...], int]] = deque(episodes, config.evaluation.window)

    def add(self, episodes: Iterable[Played]) -> None:
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
        """What the best checkpoint is chosen by; minus infinity before the first episode."""
        if not self.episodes:
            return float("-inf")
        return score(self.constraints, self.metrics()["return"], self._costs())

    def _costs(self) -> list[float]:
        return mean_costs([costs for _, costs, _ in self.episodes])
