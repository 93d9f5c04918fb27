"""The compiled loop, which plays steps of an environment one after another without Python until an episode ends.

It calls the environment's functions and the networks' by their addresses. So numba keeps one compiled loop on disk for all
of them, and each of them stays the newest. All code that calls each other stands in this one file, because numba's cache
notices a change only in the file that it compiles.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from marl_ray.envs.batch import BatchStep
from marl_ray.policies.actor_critic.compiled.arguments import NetworkInputs, NetworkShape


class WorldArrays(NamedTuple):
    """The copies of an `ArrayBatch`, and the counts of their episodes under the names of `ActorCriticCollector`."""

    states: np.ndarray
    """(copies, S) float64: what the environment keeps of each copy."""
    alive: np.ndarray
    """(copies, agents) bool."""
    observed: np.ndarray
    """(copies, agents) bool: the agents that get an observation."""
    moves: np.ndarray
    """(copies, agents) int64: the environment's numbers of the actions."""
    masks: np.ndarray
    """(copies, agents, actions) bool; (0, 0, 0) where all actions are always possible."""
    counts: np.ndarray
    """(agents,) int64: how many actions each has."""
    step: BatchStep
    """The results of the last step."""
    playing: np.ndarray
    """(copies,) bool: the copies that took part in the last step."""
    returns: np.ndarray
    """(copies,) float64, as the next three of the running episode of each copy."""
    costs: np.ndarray
    """(copies, signals) float64."""
    lengths: np.ndarray
    """(copies,) int64."""
    decisions: np.ndarray
    """(copies, policies) int64."""


class PolicyArrays(NamedTuple):
    """The arrays of one policy in a compiled loop: its network, its random numbers and its buffer.

    N is copies x agents.
    """

    weights: np.ndarray
    shape: NetworkShape
    members: np.ndarray
    """(agents,) int64: the numbers of its agents among all."""
    first: int
    """The environment's number of its first action."""
    noise: np.ndarray
    """(T, N) float64 uniforms."""
    greedy: np.ndarray
    """(N,) bool."""
    outputs: np.ndarray
    """(N, actions) float32, for each step anew, as the next two."""
    permitted: np.ndarray
    """(N, actions) bool; without rows if all actions are always possible."""
    log_probs: np.ndarray
    """(N,) float32."""
    actions: np.ndarray
    """(T, copies, agents) int64: all actions, as the environment takes them."""
    rows: np.ndarray
    """(T + 1, copies, agents, D) float32: the observations, those after the last step too."""
    allowed: np.ndarray
    """(T, copies, agents, actions) bool; without entries if all actions are always possible."""
    kept_actions: np.ndarray
    """(T, copies, agents) int64, counted from 0, of the agents that were alive."""
    kept_log_probs: np.ndarray
    """(T, copies, agents) float32, in nats."""
    acted: np.ndarray
    """(T, copies, agents) bool: who was alive."""
    mask: np.ndarray
    """(T, copies, agents) bool: who was alive and had more than one action to choose from."""
    rewards: np.ndarray
    """(T, copies, agents) float32."""
    costs: np.ndarray
    """(T, copies, agents, signals) float32: the team's costs, for each agent."""
    terminated: np.ndarray
    """(T, copies, agents) bool."""
    truncated: np.ndarray
    """(T, copies, agents) bool; False where terminated."""


@numba.njit(cache=True, nogil=True)
def choose_actions(t: int, p: int, evaluate: Any, act: Any, world: WorldArrays, part: PolicyArrays) -> None:
    """Write the actions of policy `p` at step `t` to its arrays and to the world's moves."""
    copies, agents = len(world.alive), len(part.members)
    for c in range(copies):
        for k in range(agents):
            i = part.members[k]
            alive, choices = world.alive[c, i], 2
            if len(part.permitted):
                choices = 0
                for j in range(part.permitted.shape[1]):
                    possible = world.masks[c, i, j]
                    part.permitted[c * agents + k, j] = possible
                    choices += possible
                    if alive:
                        part.allowed[t, c, k, j] = possible
            part.acted[t, c, k] |= alive
            part.mask[t, c, k] |= alive and choices > 1
            world.decisions[c, p] += part.mask[t, c, k] and world.playing[c]
    rows = part.rows[t].reshape(copies * agents, part.rows.shape[3])
    no_codes = np.empty(0, np.int32)
    inputs = NetworkInputs(rows, np.empty((0, 0), np.int32), no_codes, np.zeros(1, np.int64), np.zeros(0, np.int64))
    evaluate(part.weights, part.shape, inputs, part.outputs)
    act(part.outputs, part.permitted, part.noise[t], part.greedy, part.actions[t].reshape(len(rows)), part.log_probs)
    for c in range(copies):
        for k in range(agents):
            i = part.members[k]
            if world.alive[c, i]:
                part.kept_actions[t, c, k] = part.actions[t, c, k]
                part.kept_log_probs[t, c, k] = part.log_probs[c * agents + k]
            part.actions[t, c, k] += part.first
            world.moves[c, i] = part.actions[t, c, k]


@numba.njit(cache=True, nogil=True)
def move_world(play: Any, allow: Any, parameters: Any, world: WorldArrays) -> bool:
    """Move the world by one step. Returns False if an agent then has no possible action."""
    step, alive = world.step, world.alive
    rewards = step.rewards
    costs = step.costs
    terminated = step.terminated
    truncated = step.truncated
    rewards[:] = 0
    costs[:] = 0
    terminated[:] = False
    truncated[:] = False
    play(world.states, alive, world.moves, rewards, costs, terminated, truncated, *parameters)
    for c in range(len(alive)):
        for i in range(alive.shape[1]):
            if world.playing[c]:
                world.observed[c, i] = alive[c, i]
            if not alive[c, i]:
                rewards[c, i] = 0
                terminated[c, i] = False
                truncated[c, i] = False
                for k in range(costs.shape[2]):
                    costs[c, i, k] = 0
            truncated[c, i] &= not terminated[c, i]
            alive[c, i] &= not (terminated[c, i] or truncated[c, i])
    if allow is not None:
        masks = world.masks
        masks[:] = True
        allow(world.states, masks, *parameters)
        for c in range(len(alive)):
            for i in range(alive.shape[1]):
                choices = 0
                for j in range(world.counts[i]):
                    masks[c, i, j] |= not alive[c, i]
                    choices += masks[c, i, j]
                if not choices:
                    return False
    return True


@numba.njit(cache=True, nogil=True)
def record_step(t: int, world: WorldArrays, parts: Sequence[PolicyArrays]) -> None:
    """Add the results of step `t` to the counts of the episodes and to the buffers."""
    rewards, costs, agents = world.step.rewards, world.step.costs, world.alive.shape[1]
    team = np.zeros((len(costs), costs.shape[2]), np.float32)
    for c in range(len(rewards)):
        total = np.float32(0)
        for i in range(agents):
            total += rewards[c, i]
            for k in range(team.shape[1]):
                team[c, k] += costs[c, i, k]
        world.returns[c] += total / np.float32(agents)
        world.lengths[c] += world.playing[c]
        for k in range(team.shape[1]):
            world.costs[c, k] += team[c, k]
    for part in parts:
        for c in range(len(rewards)):
            for k in range(len(part.members)):
                i = part.members[k]
                part.rewards[t, c, k] += rewards[c, i]
                for signal in range(team.shape[1]):
                    part.costs[t, c, k, signal] += team[c, signal]
                part.terminated[t, c, k] |= world.step.terminated[c, i]
                part.truncated[t, c, k] |= world.step.truncated[c, i]


@numba.njit(cache=True, nogil=True)
def play_until_end(
    play: Any,
    observe: Any,
    allow: Any,
    parameters: Any,
    evaluate: Any,
    act: Any,
    world: WorldArrays,
    parts: Sequence[PolicyArrays],
    start: int,
    steps: int,
    truncate_last: bool,
) -> int:
    """Play from step `start` until an agent is truncated or cannot act, or a copy's episode ends, and return that step.

    Otherwise it is the last one, `steps` - 1, at which with `truncate_last` everybody is truncated.
    """
    copies, agents = world.alive.shape
    truncated, playing = world.step.truncated, np.empty(copies, np.int64)
    for t in range(start, steps):
        count, ended = 0, False
        for c in range(copies):
            world.playing[c] = False
            for i in range(agents):
                world.playing[c] |= world.alive[c, i]
            playing[count] = c
            count += world.playing[c]
        for p in range(len(parts)):
            choose_actions(t, p, evaluate, act, world, parts[p])
        possible = move_world(play, allow, parameters, world)
        for c in range(copies):
            over = True
            for i in range(agents):
                truncated[c, i] |= truncate_last and t + 1 == steps and world.alive[c, i]
                over &= not world.alive[c, i]
                ended |= truncated[c, i]
            ended |= over and world.playing[c]
        record_step(t, world, parts)
        if not possible:
            return t
        for part in parts:
            observe(world.states, playing[:count], part.members, part.rows[t + 1], *parameters)
            for c in range(copies):
                for k in range(len(part.members)):
                    i = part.members[k]
                    if (world.playing[c] and not world.observed[c, i]) or not (ended or world.alive[c, i]):
                        for d in range(part.rows.shape[3]):
                            part.rows[t + 1, c, k, d] = 0
        if ended:
            return t
    return steps - 1
