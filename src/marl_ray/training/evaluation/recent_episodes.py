"""The last training episodes.

They give the training curve, the costs that are compared with the budgets and, in a run without evaluations, the
score that selects the best checkpoint.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marl_ray.algorithms.constraints.budgets import budget_score, mean_costs, within_budget_metrics
from marl_ray.config import RunConfig
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.training.costs import CostStats
from marl_ray.training.evaluation.whole_episodes import EndedEpisode, blocking_starts, release_episodes, reported_means


class RecentEpisodes:
    """The last `evaluation.window` released episodes of all workers, and those that are held back."""

    def __init__(self, config: RunConfig, saved: JsonMapping | None = None):
        self.budgets, self.max_steps = config.budgets, config.evaluation.max_steps
        saved_episodes = {
            key: [_ended_episode(episode) for episode in (saved or {}).get(key, ())] for key in ("window", "held_back")
        }
        self.episodes: deque[EndedEpisode] = deque(saved_episodes["window"], config.evaluation.window)
        self.held_back: list[EndedEpisode] = saved_episodes["held_back"]

    def add(self, ended: Iterable[EndedEpisode], running: Sequence[tuple[int, int]]) -> list[EndedEpisode]:
        """Add the episodes that have ended on all workers and return the episodes that are released now.

        `running` are the (start, steps played) of the episodes that continue.
        """
        released, self.held_back = release_episodes([*self.held_back, *ended], blocking_starts(running, self.max_steps))
        self.episodes.extend(released)
        return released

    def state(self) -> JsonObject:
        """Return plain data for a checkpoint, in the form that `saved` takes.

        JSON writes the episodes, which are tuples, as lists. They are not converted here, because the training waits
        until this returns.
        """
        return {"window": list(self.episodes), "held_back": list(self.held_back)}

    def metrics(self) -> dict[str, float]:
        """Return means over the window, and its episodes' shares within the budgets; {} before the first episode."""
        if not self.episodes:
            return {}
        count, costs = len(self.episodes), [episode.costs for episode in self.episodes]
        metrics = {"return": sum(episode.episode_return for episode in self.episodes) / count}
        means = mean_costs(costs)
        names = ["episode_cost"] if len(means) == 1 else [f"episode_cost_{k}" for k in range(len(means))]
        metrics |= dict(zip(names, means, strict=True))
        metrics["episode_length"] = sum(episode.length for episode in self.episodes) / count
        if self.budgets:
            within = within_budget_metrics(self.budgets, costs)
            metrics |= {key: value for key, value in within.items() if "certified" not in key}
        return metrics | reported_means([episode.metrics for episode in self.episodes])

    def score(self) -> float | None:
        """Return the number that chooses a run's best checkpoint without evaluations; None before the first episode."""
        if not self.episodes:
            return None
        costs = mean_costs([episode.costs for episode in self.episodes])
        return budget_score(self.budgets, self.metrics()["return"], costs)


def _ended_episode(plain: Sequence[Any]) -> EndedEpisode:
    start, copy, episode_return, costs, length, decisions, metrics = plain
    return EndedEpisode(start, copy, episode_return, tuple(costs), length, decisions, metrics)


def cost_stats(released: Sequence[EndedEpisode], before: Mapping[str, CostStats]) -> dict[str, CostStats]:
    """Return policy -> mean costs and decisions of the episodes that this batch has released.

    If it has released none, these are the means of the last batch that did.
    """
    if not released:
        return {name: replace(stats, episodes=0) for name, stats in before.items()}
    means, count = tuple(mean_costs([episode.costs for episode in released])), len(released)
    decisions = {name: sum(episode.decisions[name] for episode in released) / count for name in before}
    return {name: CostStats(means, count, max(decisions[name], 1.0)) for name in before}
