"""Play whole episodes from fixed starts, to measure actor-critics.

Only the results of the episodes are kept. An episode is a function of (weights, seed, set of starts, number). The
numbers of workers and copies do not change it, and training draws none of its random numbers.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from pettingzoo import ParallelEnv

from marl_ray.config.random_streams import BLOCK_BITS, BLOCK_STEPS
from marl_ray.envs.batch import EnvBatch
from marl_ray.rollout.actor_critic.acting import choose_actions
from marl_ray.rollout.actor_critic.buffers import Buffer, Player
from marl_ray.rollout.rng import EVALUATION_START, action_noise, episode_seed


class FixedStart(NamedTuple):
    """The episode to play, and the way to choose its actions."""

    number: int
    start_set: int
    """0 or 1: the set of starts; the two sets share no random number."""
    greedy: bool
    """True: play the most likely actions; False: draw them."""


class WholeEpisode(NamedTuple):
    """The result of one whole episode."""

    episode_return: float
    """Return: sum of rewards, averaged over the agents."""
    costs: tuple[float, ...]
    """The sum of each cost signal over steps and agents."""
    length: int
    """Environment steps."""
    truncated: bool
    """True if the limit of steps has ended it."""
    policy_returns: dict[str, float]
    """Policy -> return of its agents alone: sum of their rewards, averaged over them."""
    metrics: dict[str, float]
    """The numbers that the environment has reported of the episode, averaged over it."""
    not_finite: str = ""
    """The first reward or cost that is not finite, with its step and the seed of the episode; empty if there is none."""


class EvaluationCopies:
    """Environment copies in which teams are measured. These are never training's copies, whose episodes continue."""

    def __init__(
        self,
        env: ParallelEnv,
        envs: EnvBatch,
        agents: Mapping[str, Sequence[str]],
        copies: int,
        seed: int,
        signals: int,
        max_steps: int,
    ):
        """Take `copies` copies of an environment, `envs`, whose spaces `env` has.

        The agents of the copies are ordered by the policies of `agents` (policy -> its agents). An episode is
        truncated after `max_steps`.
        """
        self.env = env
        self.envs = envs
        self.copies = copies
        self.signals = signals
        self.seed, self.max_steps = seed, max_steps
        self.order = order = list(env.possible_agents)
        self.columns = {name: [order.index(agent) for agent in members] for name, members in agents.items()}

    def close(self) -> None:
        """Close the environment copies."""
        self.envs.close()

    def play(self, players: Mapping[str, Player], starts: Sequence[FixedStart]) -> list[WholeEpisode]:
        """Play one episode from each start and return them in the order of the starts."""
        episodes: list[WholeEpisode] = []
        for first in range(0, len(starts), self.copies):
            wave = list(starts[first : first + self.copies])
            # All copies begin anew, because every copy is stepped, and a copy without an episode cannot be.
            padded = wave + [wave[0]] * (self.copies - len(wave))
            episodes += self._play(players, padded)[: len(wave)]
        return episodes

    def _play(self, players: Mapping[str, Player], starts: Sequence[FixedStart]) -> list[WholeEpisode]:
        """Play one episode in every copy."""
        envs, count = self.envs, self.copies
        buffers = [
            Buffer(self.env, player, self.columns[name], 1, count, self.signals) for name, player in players.items()
        ]
        widths = [player.model.distribution.noise * len(player.agents) for player in players.values()]
        greedy = np.array([start.greedy for start in starts])
        seeds = [episode_seed(self.seed, start.number, EVALUATION_START + start.start_set) for start in starts]
        for c, seed in enumerate(seeds):
            envs.reset(c, seed)
        not_finite: dict[int, str] = {}
        returns, costs, lengths = np.zeros(count), np.zeros((count, self.signals)), np.zeros(count, np.int64)
        agent_returns = np.zeros(envs.alive.shape)
        for t in range(self.max_steps):
            alive = envs.alive.copy()
            playing = alive.any(1)
            if not playing.any():
                break
            if t % BLOCK_STEPS == 0:
                noise = self._draw_noise(starts, t // BLOCK_STEPS, sum(widths))
            envs.observe([buffer.rows[0] for buffer in buffers], np.flatnonzero(playing).tolist())
            uniforms = noise[t % BLOCK_STEPS].split(widths, -1)
            parts = zip(players.values(), buffers, envs.action_masks, uniforms, strict=True)
            step = envs.step([choose_actions(*part, 0, alive[:, part[1].columns], greedy) for part in parts])
            returns += step.rewards.mean(1)
            agent_returns += step.rewards
            costs += step.costs.sum(1)
            if not (np.isfinite(returns).all() and np.isfinite(costs).all()):
                for c in range(count):
                    if c not in not_finite and (first := self._first_not_finite(step.rewards[c], step.costs[c])):
                        not_finite[c] = f"{first} at step {t + 1} of the episode of reset(seed={seeds[c]})"
            lengths += playing
        truncated = [bool(agents.any()) for agents in envs.alive]
        by_policy = {name: agent_returns[:, columns].mean(1).tolist() for name, columns in self.columns.items()}
        return [
            WholeEpisode(
                float(returns[c]),
                tuple(costs[c].tolist()),
                int(lengths[c]),
                truncated[c],
                {name: values[c] for name, values in by_policy.items()},
                envs.metrics(c),
                not_finite.get(c, ""),
            )
            for c in range(count)
        ]

    def _first_not_finite(self, rewards: np.ndarray, costs: np.ndarray) -> str:
        """Return the first reward or cost that is not finite, with its agent; empty if there is none.

        `rewards` are (agents,) and `costs` (agents, signals).
        """
        for i, agent in enumerate(self.order):
            if not np.isfinite(rewards[i]):
                return f"the reward of {agent} is {rewards[i]}"
            for k in np.flatnonzero(~np.isfinite(costs[i])):
                return f"cost {k} of {agent} is {costs[i, k]}"
        return ""

    def _draw_noise(self, starts: Sequence[FixedStart], block: int, width: int) -> torch.Tensor:
        """Return (BLOCK_STEPS, copies, width) uniforms."""
        drawn = [
            action_noise(
                self.seed,
                EVALUATION_START + (start.start_set << BLOCK_BITS) + block,
                [start.number],
                BLOCK_STEPS,
                width,
            )
            for start in starts
        ]
        return torch.from_numpy(np.concatenate(drawn, axis=1))
