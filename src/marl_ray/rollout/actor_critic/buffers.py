"""The arrays that hold one policy's batch while it is played, and the Trajectories that they become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from pettingzoo import ParallelEnv
from torch import Tensor

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.policies.actor_critic.compiled.network import CompiledNetwork
from marl_ray.policies.actor_critic.networks import Network
from marl_ray.policies.actor_critic.policy import ActorCritic
from marl_ray.policies.actor_critic.spaces import row_dtype, row_size
from marl_ray.trajectories import Trajectories


@dataclass(frozen=True)
class Player:
    """One policy as the collector needs it."""

    model: ActorCritic
    """The weights for inference."""
    agents: list[str]
    """The agents that it plays."""
    value_norm: ValueNorm
    cost_norms: tuple[ValueNorm, ...] = ()
    """The normaliser of each cost signal's values."""
    actor: CompiledNetwork | None = None
    """The actor as compiled code; None where torch's network plays."""
    critic: CompiledNetwork | None = None
    """The critic as compiled code; None where torch's network estimates values, or there is no critic."""


class Buffer:
    """The arrays of one policy, indexed by step, copy and agent of the policy."""

    def __init__(self, env: ParallelEnv, player: Player, columns: Sequence[int], steps: int, copies: int, signals: int):
        """Make arrays of `steps` x `copies` x the policy's agents; `costs` also have the `signals`.

        `rows` hold one step more, the observations after the last. `columns` are the numbers of the policy's agents among
        the environment's agents.
        """
        self.columns = list(columns)
        space = env.observation_space(player.agents[0])
        shape = (steps, copies, len(player.agents))
        self.rows = np.zeros((steps + 1, *shape[1:], row_size(space)), row_dtype(space))
        distribution = player.model.distribution
        self.actions = torch.zeros((*shape, *distribution.shape), dtype=distribution.dtype)
        self.log_probs = torch.zeros(shape)
        self.allowed: np.ndarray | None = None
        self.rewards, self.costs = np.zeros(shape, np.float32), np.zeros((*shape, signals), np.float32)
        self.acted = np.zeros(shape, bool)
        """(T, copies, agents) True where an agent was alive."""
        self.mask = np.zeros(shape, bool)
        """(T, copies, agents) True where an agent had a choice."""
        self.terminated = np.zeros(shape, bool)
        """(T, copies, agents) True where an agent's episode was terminated."""
        self.truncated = np.zeros(shape, bool)
        """(T, copies, agents) True where an agent's episode was truncated."""

    def clear(self, copies: np.ndarray) -> None:
        """Forget the steps of these copies (bool mask or indices)."""
        for array in (self.rows, self.rewards, self.costs, self.acted, self.mask, self.terminated, self.truncated):
            array[:, copies] = 0

    def permit(self, t: int, alive: np.ndarray, allowed: np.ndarray | None) -> None:
        """Store which agents act at step t, (copies, agents), and their allowed actions, (copies, agents, choices)."""
        self.acted[t] |= alive
        if allowed is None:
            self.mask[t] |= alive
            return
        if self.allowed is None:
            self.allowed = np.ones((len(self.acted), *allowed.shape), bool)
        self.allowed[t][alive] = allowed[alive]
        self.mask[t] |= alive & (allowed.sum(-1) > 1)

    def record(
        self, t: int, rewards: np.ndarray, costs: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> None:
        """Record the results of step t for the agents that acted.

        `costs` (copies, signals) are the team's, the others (copies, agents).
        """
        self.rewards[t] += rewards
        self.costs[t] += costs[:, None]
        self.terminated[t] |= terminated
        self.truncated[t] |= truncated


class CriticInputs(NamedTuple):
    """The inputs of a policy's critics at every step, and in the state after each truncation."""

    inputs: np.ndarray
    """(T + 1, copies, ...) the critics' inputs at the steps and after the last one."""
    finals: list[np.ndarray]
    """The critics' inputs after each of `truncations`."""
    truncations: list[tuple[int, int]]
    """(step, copy)."""
    open_end: np.ndarray
    """(copies, agents) bool: True for rows that continue in the next batch."""
    truncated: np.ndarray
    """(T or more, copies, agents) bool."""


@dataclass
class PlayedBatch:
    """A batch as it was played: one buffer per policy, and the observations where episodes were truncated."""

    buffers: dict[str, Buffer]
    steps: int
    """Time steps that were played (the buffers may be longer)."""
    truncations: dict[tuple[int, int], dict[str, np.ndarray]]
    """(step, copy) -> policy -> (agents, D) observations after the truncation, which the next episode has overwritten."""
    groups: np.ndarray
    """(copies,) number of each copy's group; the copies of a group share a start."""
    episodes: np.ndarray
    """(copies,) number of the episode that each row begins in."""
    greedy: np.ndarray
    """(copies,) bool."""
    ends: dict[tuple[int, int], bool] = field(default_factory=dict)
    """(step, copy) at which an episode of the whole team ended -> True if it was truncated."""

    def trajectories(self, name: str, players: Mapping[str, Player]) -> Trajectories:
        """Return the batch of one policy, with the critics' values."""
        player, buffer, steps = players[name], self.buffers[name], self.steps
        copies, agents = buffer.mask.shape[1:]
        critic_inputs = self._critic_inputs(name, player)
        inputs = critic_inputs.inputs

        def to_rows(array: np.ndarray | Tensor) -> Tensor:
            """Reshape (T, copies, agents, ...) to (copies * agents, T, ...)."""
            tensor = torch.as_tensor(array)[:steps]
            return tensor.movedim(0, 2).reshape(copies * agents, steps, *tensor.shape[3:])

        def repeat_per_agent(per_copy: np.ndarray) -> Tensor:
            """Repeat a value per copy, (copies,), for the rows of its agents."""
            return torch.as_tensor(per_copy).repeat_interleave(agents)

        shape = (steps, copies, agents)
        signals = buffer.costs.shape[-1]
        values, bootstrap = _estimate_values(
            player.critic or player.model.critic, (player.value_norm,), (*shape, 1), critic_inputs
        )
        cost_values, cost_bootstrap = _estimate_values(
            player.model.cost_critic, player.cost_norms, (*shape, signals), critic_inputs
        )
        if player.model.cost_critic is not None:
            cost_bootstrap = self._fill_cost_bootstrap(name, cost_bootstrap, players)
        team_terminated, team_truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        for (t, c), was_truncated in self.ends.items():
            (team_truncated if was_truncated else team_terminated)[t, c] = True
        return Trajectories(
            observations=to_rows(buffer.rows[:-1]),
            states=torch.from_numpy(inputs[:-1]).movedim(0, 1) if player.model.central else None,
            actions=to_rows(buffer.actions),
            log_probs=to_rows(buffer.log_probs),
            action_masks=None if buffer.allowed is None else to_rows(buffer.allowed),
            values=to_rows(values)[..., 0],
            bootstrap=to_rows(bootstrap)[..., 0],
            cost_values=to_rows(cost_values),
            cost_bootstrap=to_rows(cost_bootstrap),
            rewards=to_rows(buffer.rewards),
            costs=to_rows(buffer.costs),
            mask=to_rows(buffer.mask),
            terminated=to_rows(buffer.terminated),
            truncated=to_rows(buffer.truncated),
            team_terminated=to_rows(team_terminated),
            team_truncated=to_rows(team_truncated),
            greedy=repeat_per_agent(self.greedy),
            group=repeat_per_agent(self.groups),
            episode=repeat_per_agent(self.episodes),
            agent=torch.arange(agents).repeat(copies),
            turn=torch.zeros(copies * agents, dtype=torch.int64),
        )

    def _critic_inputs(self, name: str, player: Player) -> CriticInputs:
        """Return the inputs of a policy's critics."""
        buffer, steps = self.buffers[name], self.steps
        if player.model.central:
            joint = [b.rows[: steps + 1].reshape(steps + 1, b.rows.shape[1], -1) for b in self.buffers.values()]
            inputs = np.concatenate(joint, -1)
            finals = [
                np.concatenate([rows.reshape(-1) for rows in finals_by_policy.values()])
                for finals_by_policy in self.truncations.values()
            ]
        else:
            inputs = buffer.rows[: steps + 1]
            finals = [finals_by_policy[name] for finals_by_policy in self.truncations.values()]
        return CriticInputs(inputs, finals, list(self.truncations), self._open_end(name), buffer.truncated)

    def _open_end(self, name: str) -> np.ndarray:
        """Return (copies, agents) bool: True for a row that is not over at its last step.

        Such a row continues in the next batch, so it bootstraps from the state after that step.
        """
        buffer, last = self.buffers[name], self.steps - 1
        return np.asarray(buffer.acted[last] & ~buffer.terminated[last] & ~buffer.truncated[last])

    def _acting_at_end(self, name: str) -> np.ndarray:
        """Return (T, copies, agents) bool: where an agent is truncated, or continues after the batch's last step."""
        acting_at_end = self.buffers[name].truncated[: self.steps].copy()
        acting_at_end[-1] |= self._open_end(name)
        return acting_at_end

    def _fill_cost_bootstrap(self, name: str, bootstrap: Tensor, players: Mapping[str, Player]) -> Tensor:
        """Estimate the costs after a truncation, (T, copies, agents, K), also for agents that were done before it.

        Those get the mean of the critics' estimates for the agents of their policy that acted until then; where none
        did, for those of the other policies.
        """
        acts = torch.from_numpy(self._acting_at_end(name))[..., None]
        total, count = (bootstrap * acts).sum(2), acts.sum(2)
        others = [other for other, player in players.items() if other != name and player.model.cost_critic is not None]
        lacking = count == 0
        acting = [torch.from_numpy(self._acting_at_end(other)).any(2, keepdim=True) for other in others]
        if any(bool((other_acts & lacking).any()) for other_acts in acting):
            for other in others:
                player, other_acts = players[other], torch.from_numpy(self._acting_at_end(other))[..., None]
                shape = (self.steps, *self.buffers[other].costs.shape[1:])
                inputs = self._critic_inputs(other, player)
                costs = _estimate_values(player.model.cost_critic, player.cost_norms, shape, inputs)[1]
                total = total + torch.where(lacking, (costs * other_acts).sum(2), 0.0)
                count = count + other_acts.sum(2) * lacking
        return torch.where(acts, bootstrap, (total / count.clamp(min=1))[:, :, None])


def _estimate_values(
    critic: Network | CompiledNetwork | None,
    norms: Sequence[ValueNorm],
    shape: tuple[int, int, int, int],
    critic_inputs: CriticInputs,
) -> tuple[Tensor, Tensor]:
    """Return the values at all steps and those after the truncations, (T, copies, agents, signals) each.

    Without a critic they are zeros.
    """
    steps, copies, agents, signals = shape
    bootstrap = torch.zeros(shape)
    if critic is None:
        return torch.zeros(shape), bootstrap
    inputs = critic_inputs.inputs
    width = inputs.shape[-1]
    finals = [np.reshape(row, (-1, width)) for row in critic_inputs.finals]
    flat = np.concatenate([inputs.reshape(-1, width), *finals])
    values = critic.infer(torch.from_numpy(flat)).reshape(len(flat), -1, signals)
    values = torch.stack([norm.denormalize(values[..., k]) for k, norm in enumerate(norms)], -1)
    split = inputs.size // width
    at_steps = values[:split].reshape(steps + 1, copies, agents, signals)
    bootstrap[-1] = torch.where(torch.from_numpy(critic_inputs.open_end)[..., None], at_steps[-1], 0.0)
    for (t, c), after in zip(critic_inputs.truncations, values[split:].reshape(-1, agents, signals), strict=True):
        truncated_agents = torch.from_numpy(critic_inputs.truncated[t, c])[:, None]
        bootstrap[t, c] = torch.where(truncated_agents, after, bootstrap[t, c])
    return at_steps[:-1], bootstrap
