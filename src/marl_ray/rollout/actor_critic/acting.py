"""Choose the actions of one policy at one step of all copies, and record them in its buffer."""

import numpy as np
import torch

from marl_ray.policies.actor_critic.compiled.network import CompiledNetwork
from marl_ray.policies.actor_critic.distributions import Categorical
from marl_ray.rollout.actor_critic.buffers import Buffer, Player


def choose_actions(
    player: Player,
    buffer: Buffer,
    allowed: np.ndarray | None,
    uniforms: torch.Tensor,
    t: int,
    alive: np.ndarray,
    greedy: np.ndarray,
) -> np.ndarray:
    """Run one forward pass of one policy and return its actions as the environment takes them.

    The actions are (copies, agents, *shape). `allowed` (copies, agents, choices) bool are the possible actions, None
    where all are; `uniforms` the random numbers of step `t`; `alive` (copies, agents) bool; the copies of `greedy`
    (copies,) bool take the most likely actions.
    """
    distribution = player.model.distribution
    copies, agents = buffer.rows.shape[1:3]
    if player.actor is not None and isinstance(distribution, Categorical):
        return _choose_by_compiled_actor(player.actor, buffer, allowed, uniforms, t, alive, greedy) + distribution.start
    rows = torch.from_numpy(buffer.rows[t].reshape(copies * agents, -1))
    permitted = None if allowed is None else torch.from_numpy(allowed.reshape(copies * agents, -1))
    outputs = distribution.normalize(player.model.actor.infer(rows), permitted)
    actions = distribution.sample(outputs, uniforms.reshape(copies * agents, -1))
    if greedy.any():
        greedy_rows = torch.from_numpy(greedy).repeat_interleave(agents)
        actions[greedy_rows] = distribution.mode(outputs[greedy_rows])
    log_probs = distribution.log_prob(outputs, actions).reshape(copies, agents)
    _record_choices(buffer, t, alive, actions.reshape(buffer.actions.shape[1:]), log_probs)
    return distribution.to_env(actions).reshape(copies, agents, *distribution.shape)


def _choose_by_compiled_actor(
    actor: CompiledNetwork,
    buffer: Buffer,
    allowed: np.ndarray | None,
    uniforms: torch.Tensor,
    t: int,
    alive: np.ndarray,
    greedy: np.ndarray,
) -> np.ndarray:
    """Draw the actions of step `t`, each from one categorical of the compiled `actor`, and record them.

    Their log-probs are recorded too. Returns the actions, (copies, agents), from 0.
    """
    copies, agents = alive.shape
    rows = buffer.rows[t].reshape(copies * agents, -1)
    masks = None if allowed is None else np.ascontiguousarray(allowed.reshape(copies * agents, -1))
    noise = np.ascontiguousarray(uniforms.numpy().reshape(-1))
    drawn = actor.act(rows, noise, masks, greedy.repeat(agents))
    actions, log_probs = drawn[0].reshape(copies, agents), drawn[1].reshape(copies, agents)
    _record_choices(buffer, t, alive, torch.from_numpy(actions), torch.from_numpy(log_probs))
    return actions


def _record_choices(buffer: Buffer, t: int, alive: np.ndarray, actions: torch.Tensor, log_probs: torch.Tensor) -> None:
    """Write the actions (copies, agents, *row) and log-probs of a step.

    Agents that are not alive keep what is recorded of them.
    """
    if alive.all():
        buffer.actions[t], buffer.log_probs[t] = actions, log_probs
    else:
        buffer.actions[t].numpy()[alive] = actions.numpy()[alive]
        buffer.log_probs[t].numpy()[alive] = log_probs.numpy()[alive]
