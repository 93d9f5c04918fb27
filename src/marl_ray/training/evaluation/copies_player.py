"""Play the evaluations of actor-critics.

Evaluations are whole episodes in copies of the environment that only evaluations use.
"""

from collections.abc import Mapping, Sequence

from pettingzoo import ParallelEnv
from typing_extensions import override

from marl_ray.config import RunConfig
from marl_ray.envs.copies import make_batch
from marl_ray.policies.agreement import all_gather_values
from marl_ray.rollout.actor_critic.buffers import Player
from marl_ray.rollout.actor_critic.fixed_episodes import EvaluationCopies, FixedStart
from marl_ray.training.collectives import rank_and_world_size
from marl_ray.training.evaluation.fixed_starts import PlayedStarts, StartSet, StartsPlayer


class CopiesPlayer(StartsPlayer):
    """Plays an evaluation's episodes; see `StartsPlayer`."""

    def __init__(self, config: RunConfig, env: ParallelEnv, agents: Mapping[str, Sequence[str]]):
        self.config, self.env, self.agents = config, env, agents
        self.evaluation_copies: EvaluationCopies | None = None

    def play(self, players: Mapping[str, Player], start_set: StartSet) -> PlayedStarts:
        """Play the starts: each of the n workers plays every n-th episode."""
        count = self.config.evaluation_episodes
        greedy_options = (False, True) if start_set is StartSet.SELECTION else (False,)
        starts = [FixedStart(number, start_set, greedy) for greedy in greedy_options for number in range(count)]
        rank, workers = rank_and_world_size()
        numbers = range(rank, len(starts), workers)
        played = self._copies_for(len(starts)).play(players, [starts[k] for k in numbers])
        all_played = [pair for part in all_gather_values(list(zip(numbers, played, strict=True))) for pair in part]
        episodes = [episode for _, episode in sorted(all_played)]
        truncated = sum(episode.truncated for episode in episodes) / len(episodes)
        not_finite = next((episode.not_finite for episode in episodes if episode.not_finite), "")
        return PlayedStarts(episodes[:count], episodes[count:], 1, {"truncated": truncated}, not_finite)

    @override
    def close(self) -> None:
        if self.evaluation_copies is not None:
            self.evaluation_copies.close()

    def _copies_for(self, episodes: int) -> EvaluationCopies:
        """Make copies of the environment for evaluations alone, at most as many as training has."""
        if self.evaluation_copies is None:
            config = self.config
            episodes_here = -(-episodes // config.resources.workers)
            waves = -(-episodes_here // config.env_copies_per_worker)
            copies = -(-episodes_here // waves)
            envs = make_batch(config.env, copies, list(self.agents.values()), config.cost_signals, config.constraints)
            max_steps = config.evaluation.max_steps
            self.evaluation_copies = EvaluationCopies(
                self.env, envs, self.agents, copies, config.seed, config.cost_signals, max_steps
            )
        return self.evaluation_copies
