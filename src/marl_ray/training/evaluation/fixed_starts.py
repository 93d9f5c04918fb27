"""Evaluations while a team trains: whole episodes from starts that stay the same for the whole run.

The scores of evaluations select the bundle, stop trials and make the curves of reports. Means over training episodes
cannot do that: they favour short episodes, which end first, and they lag behind the weights.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pettingzoo import ParallelEnv

from marl_ray.algorithms.constraints.budgets import mean_costs, score, shares
from marl_ray.config import RunConfig
from marl_ray.envs.env_copies import make_batch
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.fixed_episodes import Arena, FixedStart, WholeEpisode
from marl_ray.rollout.protocol import BatchCollector
from marl_ray.training.collectives import gather, world
from marl_ray.training.errors import DivergedError

SCORED, CONFIRMED = 0, 1
"""Kinds of starts. Episodes from the first kind choose the best policy, and episodes from the second kind measure it.
The best of several noisy scores is too high on average; a score that chose nothing is not."""


class EpisodeResult(Protocol):
    """The fields of an episode that an evaluation reads."""

    @property
    def ret(self) -> float: ...
    @property
    def costs(self) -> tuple[float, ...]: ...
    @property
    def length(self) -> int: ...


class Evaluation(NamedTuple):
    """The result of one evaluation."""

    metrics: dict[str, float]
    score: float
    """The mean return of the sampled episodes. A team within its budgets scores above every team that exceeds one."""
    steps: int
    """Environment steps that all workers played for this evaluation."""


class Evaluator:
    """Evaluates the team of a run; every worker takes part in every call."""

    def __init__(
        self, config: RunConfig, env: ParallelEnv, agents: Mapping[str, Sequence[str]], collector: BatchCollector
    ):
        """`collector` is the one that training uses. In text environments it plays the evaluations too."""
        self.config, self.env, self.agents, self.collector = config, env, agents, collector
        self.arena: Arena | None = None

    def close(self) -> None:
        if self.arena is not None:
            self.arena.close()

    def evaluate(self, players: Mapping[str, Any], kind: int, steps: int) -> Evaluation:
        """Play and score sampled episodes, and for the kind SCORED greedy episodes too. Errors name `steps`, the
        training steps so far.

        Raises DivergedError if a return or a cost is not finite.
        """
        config = self.config
        extra: dict[str, float] = {}
        sampled: Sequence[EpisodeResult]
        greedy: Sequence[EpisodeResult]
        if config.language:
            from marl_ray.rollout.text.collector import TextCollector
            from marl_ray.training.evaluation.held_out import play_held_out, solved_shares

            assert isinstance(self.collector, TextCollector)
            drawn, chosen = play_held_out(config, self.collector, players, kind, kind == SCORED)
            sampled, greedy = drawn, chosen
            extra = solved_shares(drawn, chosen, config.evaluation.samples)
        else:
            played = self._play(players, kind)
            sampled = played[: config.evaluation_episodes]
            greedy = played[config.evaluation_episodes :]
            extra["cut"] = sum(episode.cut for episode in played) / len(played)
        costs = [episode.costs for episode in sampled]
        if not all(map(math.isfinite, (n for e in (*sampled, *greedy) for n in (e.ret, *e.costs)))):
            raise DivergedError(f"evaluation at step {steps}: returns or costs are not finite")
        metrics = {"return": _mean([episode.ret for episode in sampled])}
        each = config.evaluation.samples if config.language else 1  # episodes of one start are not independent
        starts = [sampled[first : first + each] for first in range(0, len(sampled), each)]
        metrics |= _bounds([_mean([episode.ret for episode in start]) for start in starts])
        if greedy:
            metrics["greedy_return"] = _mean([episode.ret for episode in greedy])
        metrics["episode_length"] = _mean([episode.length for episode in sampled])
        if config.budgets:
            metrics |= {f"episode_cost_{k}": mean for k, mean in enumerate(mean_costs(costs))}
            metrics |= shares(config.budgets, costs)
        judged = score(config.budgets, metrics["return"], mean_costs(costs))
        return Evaluation(metrics | extra, judged, sum(episode.length for episode in (*sampled, *greedy)))

    def _play(self, players: Mapping[str, Player], kind: int) -> list[WholeEpisode]:
        """Play the episodes and gather them from all n workers, each of which plays every n-th one; returns the sampled
        episodes, then the greedy ones."""
        count = self.config.evaluation_episodes
        ways = (False, True) if kind == SCORED else (False,)
        starts = [FixedStart(number, kind, greedy) for greedy in ways for number in range(count)]
        rank, workers = world()
        own = range(rank, len(starts), workers)
        played = self._arena(len(starts)).play(players, [starts[k] for k in own])
        everywhere = [pair for part in gather(list(zip(own, played, strict=True))) for pair in part]
        return [episode for _, episode in sorted(everywhere)]

    def _arena(self, episodes: int) -> Arena:
        """Make copies of the environment for evaluations alone, at most as many as training has."""
        if self.arena is None:
            config = self.config
            own = -(-episodes // config.resources.workers)
            waves = -(-own // config.env_copies_per_worker)
            copies = -(-own // waves)
            envs = make_batch(config.env, copies, list(self.agents.values()), config.signals, config.constraints)
            most = config.evaluation.max_steps
            self.arena = Arena(self.env, envs, self.agents, copies, config.seed, config.signals, most)
        return self.arena


def _bounds(returns: Sequence[float]) -> dict[str, float]:
    """Student's 95 % interval of the mean of independent returns as `return_low` and `return_high`; empty for a single
    one."""
    from scipy.special import stdtrit  # scipy is imported here, because every process of a run imports this file

    if len(returns) < 2:
        return {}
    mean = _mean(returns)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in returns) / (len(returns) - 1))
    half = float(stdtrit(len(returns) - 1, 0.975)) * deviation / math.sqrt(len(returns))
    return {"return_low": mean - half, "return_high": mean + half}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
