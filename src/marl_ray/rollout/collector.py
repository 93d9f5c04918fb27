"""Many environment copies played in step by one batch of actions per policy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from pettingzoo import ParallelEnv

from marl_ray.algorithms.value_norm import ValueNorm
from marl_ray.policies.actor_critic import ActorCritic
from marl_ray.policies.spaces import row_dtype, row_size, to_row
from marl_ray.rollout.random import action_noise, episode_seed
from marl_ray.trajectories import Trajectories


class Episode(NamedTuple):
    """A finished episode."""

    step: int
    """Time index within the batch at which it ended."""
    copy: int
    ret: float
    """Return: sum of rewards, averaged over the agents."""
    cost: float
    """Sum of costs over steps and agents."""
    length: int
    """Environment steps."""


@dataclass
class _Copy:
    """One environment copy and its running episode."""

    env: ParallelEnv
    number: int
    episode: int
    history: list[dict[str, Any]]
    """Actions since the episode began: replayed on resume, so no environment is ever pickled."""
    ret: float = 0.0
    cost: float = 0.0


@dataclass(frozen=True)
class Player:
    """One policy as the collector needs it: weights for inference, the agents it plays, its value normaliser."""

    model: ActorCritic
    agents: list[str]
    value_norm: ValueNorm


class _Buffers:
    """Arrays of one policy for one batch: time first, then copy, then agent of the policy."""

    def __init__(self, env: ParallelEnv, player: Player, steps: int, copies: int):
        agent = player.agents[0]
        self.space = env.observation_space(agent)
        self.plain = len(self.space.shape or ()) == 1  # an observation is its own row: most are, and this is a hot path
        shape = (steps, copies, len(player.agents))
        self.rows = np.zeros((steps + 1, *shape[1:], row_size(self.space)), row_dtype(self.space))
        self.final: list[np.ndarray] = []
        distribution = player.model.distribution
        self.actions = torch.zeros((*shape, *distribution.shape), dtype=distribution.dtype)
        self.log_probs = torch.zeros(shape)
        self.rewards, self.costs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.mask, self.terminated, self.truncated = (np.zeros(shape, bool) for _ in range(3))

    def write(self, t: int, c: int, agents: list[str], observations: Mapping[str, Any]) -> None:
        """Rows of the observations before step t; agents that are gone read as zeros (rows start as zeros)."""
        rows = self.rows[t, c]
        for k, agent in enumerate(agents):
            if agent in observations:
                rows[k] = observations[agent] if self.plain else to_row(self.space, observations[agent]).reshape(-1)


class Collector:
    """Plays `copies` of an environment for `steps` steps per batch; episodes go on from batch to batch."""

    def __init__(
        self,
        make_env: Callable[[], ParallelEnv],
        copies: range,
        steps: int,
        seed: int,
        state: Mapping[str, Any] | None = None,
    ):
        """`copies` are the numbers of this worker's copies among all; `state` continues where `state()` was taken."""
        self.steps, self.seed, self.numbers = steps, seed, copies
        self.copies = [_Copy(make_env(), number, 0, []) for number in copies]
        self.observations: list[dict[str, Any]] = []
        for copy in self.copies:
            saved = (state or {}).get(str(copy.number), {"episode": 0, "actions": []})
            copy.episode = saved["episode"]
            observations = self._reset(copy)
            for actions in saved["actions"]:
                observations = self._step(copy, actions)[0]
            self.observations.append(observations)

    def state(self) -> dict[str, Any]:
        """Plain data from which another collector, with any number of workers, continues bit for bit."""
        return {
            str(copy.number): {
                "episode": copy.episode,
                "actions": [{a: np.asarray(x).tolist() for a, x in actions.items()} for actions in copy.history],
            }
            for copy in self.copies
        }

    def close(self) -> None:
        for copy in self.copies:
            copy.env.close()

    def _reset(self, copy: _Copy) -> dict[str, Any]:
        copy.history, copy.ret, copy.cost = [], 0.0, 0.0
        observations, _ = copy.env.reset(seed=episode_seed(self.seed, copy.number, copy.episode))
        return observations

    def _step(self, copy: _Copy, actions: dict[str, Any]) -> tuple[Any, ...]:
        copy.history.append(actions)
        result = copy.env.step(actions)
        copy.ret += sum(result[1].values()) / len(copy.env.possible_agents)
        for info in result[4].values():
            copy.cost += info.get("cost", 0.0)
        return result

    def collect(self, players: Mapping[str, Player], iteration: int) -> tuple[dict[str, Trajectories], list[Episode]]:
        """One batch: Trajectories per policy and the episodes that ended in it."""
        env = self.copies[0].env
        buffers = {name: _Buffers(env, player, self.steps, len(self.copies)) for name, player in players.items()}
        first_episode = [copy.episode for copy in self.copies]
        widths = [player.model.distribution.noise * len(player.agents) for player in players.values()]
        noise = torch.from_numpy(action_noise(self.seed, iteration, self.numbers, self.steps, sum(widths)))
        cuts: list[tuple[int, int]] = []
        episodes: list[Episode] = []
        for c, observations in enumerate(self.observations):
            for name, player in players.items():
                buffers[name].write(0, c, player.agents, observations)

        for t in range(self.steps):
            choices = _act(players, buffers, t, noise[t].split(widths, -1))
            for c, copy in enumerate(self.copies):
                alive = tuple(copy.env.agents)
                actions = {agent: choices[agent][c] for agent in alive}
                observations, rewards, terminated, truncated, infos = self._step(copy, actions)
                cut = False
                for name, player in players.items():
                    buffer = buffers[name]
                    for k, agent in enumerate(player.agents):
                        if agent not in actions:
                            continue
                        buffer.mask[t, c, k] = True
                        if rewards[agent]:
                            buffer.rewards[t, c, k] = rewards[agent]
                        if infos[agent]:
                            buffer.costs[t, c, k] = infos[agent].get("cost", 0.0)
                        if terminated[agent]:
                            buffer.terminated[t, c, k] = True
                        elif truncated[agent]:
                            buffer.truncated[t, c, k] = cut = True
                if cut:
                    cuts.append((t, c))
                    for name, player in players.items():
                        buffers[name].write(t + 1, c, player.agents, observations)
                        buffers[name].final.append(buffers[name].rows[t + 1, c].copy())
                        buffers[name].rows[t + 1, c] = 0
                if not copy.env.agents:
                    episodes.append(Episode(t, copy.number, copy.ret, copy.cost, len(copy.history)))
                    copy.episode += 1
                    observations = self._reset(copy)
                elif len(copy.env.agents) < len(alive):  # an agent's last observation is not a decision's
                    observations = {agent: observations[agent] for agent in copy.env.agents}
                for name, player in players.items():
                    buffers[name].write(t + 1, c, player.agents, observations)
                self.observations[c] = observations
        return {
            name: _trajectories(name, players, buffers, cuts, self.numbers, first_episode) for name in players
        }, episodes


def _act(
    players: Mapping[str, Player], buffers: Mapping[str, _Buffers], t: int, noise: tuple[torch.Tensor, ...]
) -> dict[str, list[Any]]:
    """One forward pass per policy; agent -> its action in every copy, as the environment takes it."""
    choices: dict[str, list[Any]] = {}
    for (name, player), uniforms in zip(players.items(), noise, strict=True):
        buffer, distribution = buffers[name], player.model.distribution
        copies, agents = buffer.rows.shape[1:3]
        rows = torch.from_numpy(buffer.rows[t].reshape(copies * agents, -1))
        outputs = distribution.normalize(player.model.actor.infer(rows))
        actions = distribution.sample(outputs, uniforms.reshape(copies * agents, -1))
        buffer.actions[t] = actions.reshape(buffer.actions.shape[1:])
        buffer.log_probs[t] = distribution.log_prob(outputs, actions).reshape(copies, agents)
        taken = distribution.to_env(actions).reshape(copies, agents, *distribution.shape)
        for k, agent in enumerate(player.agents):
            # Environments compare discrete actions with Python integers much faster than with NumPy scalars.
            choices[agent] = taken[:, k].tolist() if not distribution.shape else list(taken[:, k])
    return choices


def _trajectories(
    name: str,
    players: Mapping[str, Player],
    buffers: Mapping[str, _Buffers],
    cuts: list[tuple[int, int]],
    numbers: range,
    first_episode: list[int],
) -> Trajectories:
    player, buffer = players[name], buffers[name]
    steps, copies, agents = buffer.mask.shape
    if player.model.central:
        inputs = np.concatenate([b.rows.reshape(steps + 1, copies, -1) for b in buffers.values()], -1)
        finals = [
            np.concatenate([row.reshape(-1) for row in rows])
            for rows in zip(*(b.final for b in buffers.values()), strict=True)
        ]
    else:
        inputs, finals = buffer.rows, buffer.final
    width = inputs.shape[-1]
    flat = np.concatenate([inputs.reshape(-1, width), *(np.reshape(row, (-1, width)) for row in finals)])
    values = player.value_norm.denormalize(player.model.critic.infer(torch.from_numpy(flat)))
    split = inputs.size // width
    at_steps = values[:split].reshape(steps + 1, copies, agents)
    terminated, truncated = torch.from_numpy(buffer.terminated), torch.from_numpy(buffer.truncated)
    bootstrap = torch.zeros(steps, copies, agents)
    cut_here = torch.from_numpy(buffer.mask[-1]) & ~terminated[-1] & ~truncated[-1]
    bootstrap[-1] = torch.where(cut_here, at_steps[-1], 0.0)
    for (t, c), after in zip(cuts, values[split:].reshape(-1, agents), strict=True):
        bootstrap[t, c] = torch.where(truncated[t, c], after, bootstrap[t, c])

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        """(T, copies, agents, ...) to (copies * agents, T, ...)."""
        return tensor.movedim(0, 2).reshape(copies * agents, steps, *tensor.shape[3:])

    copy_numbers = torch.as_tensor(list(numbers))
    return Trajectories(
        observations=rows(torch.from_numpy(buffer.rows[:-1])),
        states=torch.from_numpy(inputs[:-1]).movedim(0, 1) if player.model.central else None,
        actions=rows(buffer.actions),
        log_probs=rows(buffer.log_probs),
        values=rows(at_steps[:-1]),
        bootstrap=rows(bootstrap),
        rewards=rows(torch.from_numpy(buffer.rewards)),
        costs=rows(torch.from_numpy(buffer.costs)),
        mask=rows(torch.from_numpy(buffer.mask)),
        terminated=rows(terminated),
        truncated=rows(truncated),
        group=copy_numbers.repeat_interleave(agents),
        episode=torch.as_tensor(first_episode).repeat_interleave(agents),
        agent=torch.arange(agents).repeat(copies),
        turn=torch.zeros(copies * agents, dtype=torch.int64),
    )
