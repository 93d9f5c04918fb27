"""Evaluations while a team trains.

They are whole episodes from starts that stay the same for the whole run. The scores of evaluations select the bundle,
stop trials and make the curves of reports. Means over training episodes cannot do that: they favour short episodes,
which end first, and they lag behind the weights.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from marl_ray.algorithms.constraints.budgets import budget_score, mean_costs, within_budget_metrics
from marl_ray.config import RunConfig
from marl_ray.evaluation.student_interval import student_interval
from marl_ray.training.errors import DivergedError
from marl_ray.training.evaluation.whole_episodes import reported_means


class StartSet(IntEnum):
    """The two sets of starts of a run, whose numbers are keys of random numbers.

    The best of several noisy scores is too high on average; a score that chose nothing is not.
    """

    SELECTION = 0
    """Episodes from these starts choose the best policy."""
    CONFIRMATION = 1
    """Episodes from these starts measure the policy that was chosen."""


class EpisodeResult(Protocol):
    """The fields of an episode that an evaluation reads."""

    @property
    def episode_return(self) -> float:
        """Return: sum of rewards, averaged over the agents."""

    @property
    def costs(self) -> tuple[float, ...]:
        """The sum of each cost signal over steps and agents."""

    @property
    def length(self) -> int:
        """Number of environment steps."""

    @property
    def policy_returns(self) -> Mapping[str, float]:
        """Policy -> the return of its agents."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Name of a number in the environment's infos -> its value in the episode."""


class Evaluation(NamedTuple):
    """The result of one evaluation."""

    metrics: dict[str, float]
    score: float
    """The mean return of the sampled episodes. A team within its budgets scores above every team that exceeds one."""
    steps: int
    """Environment steps that all workers played for this evaluation."""


class PlayedStarts(NamedTuple):
    """The episodes of an evaluation, of all workers, in the order of their starts."""

    sampled_episodes: Sequence[EpisodeResult]
    greedy_episodes: Sequence[EpisodeResult]
    """Episodes of the same starts, in which every policy takes its most likely action; empty for CONFIRMATION."""
    samples: int
    """Number of neighbouring sampled episodes that have one start, and are so not independent of each other."""
    metrics: dict[str, float]
    """Metrics that only this family of policies has."""
    not_finite: str = ""
    """The first reward or cost that is not finite, and where; empty if there is none, or where that is not known."""


class StartsPlayer(Protocol):
    """Plays the episodes of a run's evaluations; every worker makes the same calls."""

    def play(self, players: Mapping[str, Any], start_set: StartSet) -> PlayedStarts:
        """Play the starts of a set, and with SELECTION greedy episodes too.

        Nothing that training reads changes.
        """

    def close(self) -> None:
        """Release what only evaluations use."""


class Evaluator:
    """Evaluates the team of a run; every worker takes part in every call."""

    def __init__(self, config: RunConfig, starts: StartsPlayer):
        self.config, self.starts = config, starts

    def close(self) -> None:
        """Release what only evaluations use."""
        self.starts.close()

    def evaluate(self, players: Mapping[str, Any], start_set: StartSet, steps: int) -> Evaluation:
        """Play and score sampled episodes, and for SELECTION greedy episodes too.

        Errors name `steps`, the training steps so far. Raises DivergedError if a return or a cost is not finite.
        """
        config = self.config
        sampled, greedy, samples, family_metrics, not_finite = self.starts.play(players, start_set)
        costs = [episode.costs for episode in sampled]
        if not all(map(math.isfinite, (n for e in (*sampled, *greedy) for n in (e.episode_return, *e.costs)))):
            place = f": {not_finite}" if not_finite else ""
            raise DivergedError(f"evaluation at step {steps}: returns or costs are not finite{place}")
        metrics = {"return": _mean([episode.episode_return for episode in sampled])}
        starts = [sampled[first : first + samples] for first in range(0, len(sampled), samples)]
        returns = [_mean([episode.episode_return for episode in start]) for start in starts]
        if len(returns) > 1:
            metrics["return_low"], metrics["return_high"] = student_interval(returns)
        policies = sampled[0].policy_returns
        if len(policies) > 1:
            metrics |= {f"return/{name}": _mean([e.policy_returns[name] for e in sampled]) for name in policies}
        if greedy:
            metrics["greedy_return"] = _mean([episode.episode_return for episode in greedy])
        metrics["episode_length"] = _mean([episode.length for episode in sampled])
        if config.budgets:
            metrics |= {f"episode_cost_{k}": mean for k, mean in enumerate(mean_costs(costs))}
            metrics |= within_budget_metrics(config.budgets, costs)
        metrics |= reported_means([episode.metrics for episode in sampled])
        score = budget_score(config.budgets, metrics["return"], mean_costs(costs))
        return Evaluation(metrics | family_metrics, score, sum(episode.length for episode in (*sampled, *greedy)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
