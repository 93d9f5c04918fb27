"""Steps of a compiled environment by compiled policies, one after another without Python, until an episode ends.

The loop calls the environment's functions and the networks' by their addresses. So numba keeps one compiled loop on disk
for all of them, and each of them stays the newest.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numba
import numpy as np
import torch
from numba import types
from numba.core.errors import NumbaError
from numba.extending import is_jitted

from marl_ray.envs.arrays import ArrayBatch
from marl_ray.envs.batch import BatchStep, EnvBatch
from marl_ray.policies.actor_critic.compiled.arguments import NetworkInputs, NetworkShape, of_vectors
from marl_ray.policies.actor_critic.compiled.kernels import evaluate
from marl_ray.policies.actor_critic.compiled.sampling import act
from marl_ray.policies.actor_critic.distributions import Categorical
from marl_ray.rollout.actor_critic.buffers import Buffer, Player


class WorldArrays(NamedTuple):
    """The copies of an `ArrayBatch` and what is counted of their episodes; `Collector` has the same names."""

    states: np.ndarray
    alive: np.ndarray
    observed: np.ndarray
    moves: np.ndarray
    masks: np.ndarray
    """(copies, agents, actions) bool; (0, 0, 0) where all actions are always possible."""
    counts: np.ndarray
    """(agents,) int64: how many actions each has."""
    step: BatchStep
    """The results of the last step."""
    playing: np.ndarray
    """(copies,) bool: the copies that took part in the last step."""
    returns: np.ndarray
    costs: np.ndarray
    lengths: np.ndarray
    decisions: np.ndarray


class PolicyArrays(NamedTuple):
    """The arrays of one policy in a compiled loop: its network, its random numbers and its buffer. N is copies x agents."""

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
    allowed: np.ndarray
    kept_actions: np.ndarray
    kept_log_probs: np.ndarray
    acted: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray
    costs: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


@numba.njit(cache=True, nogil=True)
def choose(t: int, p: int, evaluate: Any, act: Any, world: WorldArrays, part: PolicyArrays) -> None:
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
    nothing = np.empty(0, np.int32)
    inputs = NetworkInputs(rows, np.empty((0, 0), np.int32), nothing, np.zeros(1, np.int64), np.zeros(0, np.int64))
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
def move(play: Any, allow: Any, parameters: Any, world: WorldArrays) -> bool:
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
def record(t: int, world: WorldArrays, parts: Sequence[PolicyArrays]) -> None:
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
    cut: bool,
) -> int:
    """Play from step `start` until an agent is cut or cannot act, or a copy's episode ends, and return that step.

    Otherwise it is the last one, `steps` - 1, at which with `cut` everybody is cut.
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
            choose(t, p, evaluate, act, world, parts[p])
        possible = move(play, allow, parameters, world)
        for c in range(copies):
            over = True
            for i in range(agents):
                truncated[c, i] |= cut and t + 1 == steps and world.alive[c, i]
                over &= not world.alive[c, i]
                ended |= truncated[c, i]
            ended |= over and world.playing[c]
        record(t, world, parts)
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


class CompiledPlay:
    """The compiled steps of one batch. Writes what the steps of `Collector` write."""

    def __init__(
        self,
        envs: ArrayBatch,
        players: Mapping[str, Player],
        buffers: Mapping[str, Buffer],
        noise: Sequence[torch.Tensor],
        greedy: np.ndarray,
        counts: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        cut: bool,
    ):
        """Prepare the arrays that the compiled loop plays in.

        `noise` has the uniforms of each policy, (T, copies, agents); `greedy` is (copies,) bool; `counts` are the
        returns, costs, lengths and decisions of the running episodes. With `cut` the last step cuts everybody.
        """
        self.envs, self.steps, self.cut = envs, len(noise[0]), cut
        masks = np.empty((0, 0, 0), bool) if envs.masks is None else envs.masks
        step = BatchStep.zeros(*envs.alive.shape, envs.signals)
        playing = np.zeros(len(envs.alive), bool)
        arrays = envs.states, envs.alive, envs.observed, envs.moves, masks, envs.counts, step, playing
        self.world = WorldArrays(*arrays, *counts)
        self.parts = tuple(
            _policy_arrays(envs, members, player, buffer, own_noise, greedy)
            for members, player, buffer, own_noise in zip(
                envs.members, players.values(), buffers.values(), noise, strict=True
            )
        )
        self.functions = envs.play, envs.observe_rows, envs.allow, envs.parameters, evaluate, act
        self.loop = _entry(envs, self.functions, self.world, self.parts)

    def play(self, t: int) -> int:
        """Play from step `t` until something ends, and return the last step.

        Raises MarlRayError if an agent is left without a possible action.
        """
        last: int = self.loop(*self.functions, self.world, self.parts, t, self.steps, self.cut)
        self.envs.share_masks()
        return last

    def actions(self, first: int, last: int) -> list[list[np.ndarray]]:
        """Return each policy's actions (copies, agents) at the steps `first` to `last`, as the environment takes them."""
        return [[part.actions[t] for part in self.parts] for t in range(first, last + 1)]

    @property
    def playing_copies(self) -> np.ndarray:
        """(copies,) bool: the copies that took part in the last step."""
        return self.world.playing

    @property
    def truncated_agents(self) -> np.ndarray:
        """(copies, agents) bool: who was cut at the last step."""
        return self.world.step.truncated


def has_compiled_loop(envs: EnvBatch, players: Mapping[str, Player], buffers: Mapping[str, Buffer]) -> bool:
    """Return True if the compiled loop can play this environment with these policies.

    All are compiled, policies read vectors of float32, and functions take exactly the loop's types and return nothing.
    """
    if type(envs) is not ArrayBatch:  # a subclass may step in another way
        return False
    return (
        all(player.actor is not None and not player.actor.layout.coded for player in players.values())
        and all(isinstance(player.model.distribution, Categorical) for player in players.values())
        and all(buffer.rows.dtype == np.float32 for buffer in buffers.values())
        and all(is_jitted(function) for function in (envs.play, envs.observe_rows, envs.allow or envs.observe_rows))
        and _environment_types(envs) is not None
    )


def _policy_arrays(
    envs: ArrayBatch, members: np.ndarray, player: Player, buffer: Buffer, noise: torch.Tensor, greedy: np.ndarray
) -> PolicyArrays:
    assert player.actor is not None
    steps, copies, agents = buffer.acted.shape
    actions = int(player.actor.layout.widths[-1])
    if envs.masks is not None and buffer.allowed is None:
        buffer.allowed = np.ones((steps, copies, agents, actions), bool)
    return PolicyArrays(
        weights=player.actor.weights,
        shape=player.actor.layout,
        members=members,
        first=int(envs.first[members[0]]),
        noise=np.ascontiguousarray(noise.numpy().reshape(steps, -1)),
        greedy=greedy.repeat(agents),
        outputs=np.empty((copies * agents, actions), np.float32),
        permitted=np.empty((0 if envs.masks is None else copies * agents, actions), bool),
        log_probs=np.empty(copies * agents, np.float32),
        actions=np.zeros((steps, copies, agents), np.int64),
        rows=buffer.rows,
        allowed=np.empty((0, 0, 0, 0), bool) if buffer.allowed is None else buffer.allowed,
        kept_actions=buffer.actions.numpy(),
        kept_log_probs=buffer.log_probs.numpy(),
        acted=buffer.acted,
        mask=buffer.mask,
        rewards=buffer.rewards,
        costs=buffer.costs,
        terminated=buffer.terminated,
        truncated=buffer.truncated,
    )


def _entry(
    envs: ArrayBatch, functions: tuple[Any, ...], world: WorldArrays, parts: tuple[PolicyArrays, ...]
) -> Callable[..., int]:
    """Return the compiled `play_until_end` for arguments of these types; it raises the errors of the functions."""
    part = parts[0]
    rows = part.rows[0].reshape(len(part.outputs), -1)
    kinds = [
        *cast(list[types.Type], _environment_types(envs)),
        _by_address(evaluate, part.weights, part.shape, of_vectors(rows), part.outputs),
        _by_address(act, part.outputs, part.permitted, part.noise[0], part.greedy, part.actions[0, 0], part.log_probs),
    ]
    kinds += [numba.typeof(world), numba.typeof(parts), types.int64, types.int64, types.boolean]
    entry: Callable[..., int] = play_until_end.get_compile_result(types.int64(*kinds)).entry_point
    return entry


def _environment_types(envs: ArrayBatch) -> list[types.Type] | None:
    """Return the types of `play`, `observe`, `allow` and `parameters` as the loop takes them; None if it cannot."""
    step = BatchStep.zeros(*envs.alive.shape, envs.signals)
    numbers, rows, parameters = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32), envs.parameters
    try:
        of_parameters = numba.typeof(parameters)
    except ValueError:  # numba has no type for one of them
        return None
    kinds = [
        _by_address(envs.play, envs.states, envs.alive, envs.moves, *step, *parameters),
        _by_address(envs.observe_rows, envs.states, numbers, numbers, rows, *parameters),
        types.none if envs.allow is None else _by_address(envs.allow, envs.states, envs.masks, *parameters),
        of_parameters if _is_plain(of_parameters) else None,
    ]
    return None if None in kinds else kinds


def _is_plain(kind: types.Type) -> bool:
    """Return True for numbers, arrays of them, and tuples of both.

    numba has one file for the types of all loops, which cannot be read where the package of a class in it is missing.
    """
    if isinstance(kind, types.BaseTuple):
        is_ours = not isinstance(kind, types.BaseNamedTuple) or kind.instance_class.__module__.startswith("marl_ray.")
        return is_ours and all(map(_is_plain, kind))
    number = kind.dtype if isinstance(kind, types.Array) else kind
    return isinstance(number, types.Number | types.Boolean | types.NoneType)


def _by_address(function: Any, *arguments: Any) -> types.FunctionType | None:
    """Return the type of a compiled function that takes such arguments and returns nothing; None for another.

    The caller would write what another one returns into foreign memory.
    """
    return _type_of_function(function, tuple(map(numba.typeof, arguments)))


@lru_cache(64)
def _type_of_function(function: Any, arguments: tuple[types.Type, ...]) -> types.FunctionType | None:
    signature = types.void(*arguments)
    try:
        returned = function.get_compile_result(signature).signature.return_type
    except (NumbaError, TypeError):  # it has signatures of its own, defaults, or an error that a single step shows
        return None
    return types.FunctionType(signature) if returned == types.none else None
