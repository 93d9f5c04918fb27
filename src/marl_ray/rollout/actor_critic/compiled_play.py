"""The steps of one batch by the compiled loop, for environments and policies whose functions are compiled.

`CompiledPlay` lays out the arrays of environment, policies and buffers as `compiled_loop` takes them, and finds the loop for
the types of their functions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import numba
import numpy as np
import torch
from numba import types
from numba.core.errors import NumbaError
from numba.extending import is_jitted

from marl_ray.envs.arrays import ArrayBatch
from marl_ray.envs.batch import BatchStep, EnvBatch
from marl_ray.policies.actor_critic.compiled.arguments import of_vectors
from marl_ray.policies.actor_critic.compiled.kernels import evaluate
from marl_ray.policies.actor_critic.compiled.sampling import act
from marl_ray.policies.actor_critic.distributions import Categorical
from marl_ray.rollout.actor_critic.buffers import Buffer, Player
from marl_ray.rollout.actor_critic.compiled_loop import PolicyArrays, WorldArrays, play_until_end


class CompiledPlay:
    """The compiled steps of one batch. Writes what the steps of `ActorCriticCollector` write."""

    def __init__(
        self,
        envs: ArrayBatch,
        players: Mapping[str, Player],
        buffers: Mapping[str, Buffer],
        noise: Sequence[torch.Tensor],
        greedy: np.ndarray,
        counts: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        truncate_last: bool,
    ):
        """Prepare the arrays that the compiled loop plays in.

        `noise` has the uniforms of each policy, (T, copies, agents); `greedy` is (copies,) bool; `counts` are the
        returns, costs, lengths and decisions of the running episodes. With `truncate_last` the last step
        truncates everybody.
        """
        self.envs, self.steps, self.truncate_last = envs, len(noise[0]), truncate_last
        masks = np.empty((0, 0, 0), bool) if envs.masks is None else envs.masks
        step = BatchStep.zeros(len(envs.alive), len(envs.agents), envs.signals)
        playing = np.zeros(len(envs.alive), bool)
        arrays = envs.states, envs.alive, envs.observed, envs.moves, masks, envs.counts, step, playing
        self.world = WorldArrays(*arrays, *counts)
        self.parts = tuple(
            _make_policy_arrays(envs, members, player, buffer, policy_noise, greedy)
            for members, player, buffer, policy_noise in zip(
                envs.members, players.values(), buffers.values(), noise, strict=True
            )
        )
        self.functions = envs.step_copies, envs.observe_rows, envs.allow, envs.parameters, evaluate, act
        self.loop = _compile_loop(envs, self.functions, self.world, self.parts)

    def play(self, t: int) -> int:
        """Play from step `t` until something ends, and return the last step.

        Raises MarlRayError if an agent is left without a possible action.
        """
        last: int = self.loop(*self.functions, self.world, self.parts, t, self.steps, self.truncate_last)
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
        """(copies, agents) bool: who was truncated at the last step."""
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
        and all(
            is_jitted(function) for function in (envs.step_copies, envs.observe_rows, envs.allow or envs.observe_rows)
        )
        and _environment_types(envs) is not None
    )


def _make_policy_arrays(
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


def _compile_loop(
    envs: ArrayBatch, functions: tuple[object, ...], world: WorldArrays, parts: tuple[PolicyArrays, ...]
) -> Callable[..., int]:
    """Return the compiled `play_until_end` for arguments of these types.

    The compiled function raises the errors of those that it calls.
    """
    part = parts[0]
    rows = part.rows[0].reshape(len(part.outputs), -1)
    argument_types = [
        *cast(list[types.Type], _environment_types(envs)),
        _address_type(evaluate, part.weights, part.shape, of_vectors(rows), part.outputs),
        _address_type(
            act, part.outputs, part.permitted, part.noise[0], part.greedy, part.actions[0, 0], part.log_probs
        ),
    ]
    argument_types += [numba.typeof(world), numba.typeof(parts), types.int64, types.int64, types.boolean]
    entry: Callable[..., int] = play_until_end.get_compile_result(types.int64(*argument_types)).entry_point
    return entry


def _environment_types(envs: ArrayBatch) -> list[types.Type] | None:
    """Return the types of `play`, `observe`, `allow` and `parameters` as the loop takes them; None if it cannot."""
    step = BatchStep.zeros(len(envs.alive), len(envs.agents), envs.signals)
    numbers, rows, parameters = np.empty(0, np.int64), np.empty((0, 0, 0), np.float32), envs.parameters
    try:
        of_parameters = numba.typeof(parameters)
    except ValueError:  # numba has no type for one of them
        return None
    argument_types = [
        _address_type(envs.step_copies, envs.states, envs.alive, envs.moves, *step, *parameters),
        _address_type(envs.observe_rows, envs.states, numbers, numbers, rows, *parameters),
        types.none if envs.allow is None else _address_type(envs.allow, envs.states, envs.masks, *parameters),
        of_parameters if _is_plain(of_parameters) else None,
    ]
    return None if None in argument_types else argument_types


def _is_plain(kind: types.Type) -> bool:
    """Return True for numbers, arrays of them, and tuples of both.

    numba has one file for the types of all loops, which cannot be read where the package of a class in it is missing.
    """
    if isinstance(kind, types.BaseTuple):
        is_ours = not isinstance(kind, types.BaseNamedTuple) or kind.instance_class.__module__.startswith("marl_ray.")
        return is_ours and all(map(_is_plain, kind))
    number = kind.dtype if isinstance(kind, types.Array) else kind
    return isinstance(number, types.Number | types.Boolean | types.NoneType)


def _address_type(function: object, *arguments: object) -> types.FunctionType | None:
    """Return the type of a compiled function that takes such arguments and returns nothing.

    The type is None for another function. The caller would write what another one returns into foreign memory.
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
