"""Compiled batches of mpe2's `simple_spread_v3`, `simple_tag_v3` and `simple_reference_v3`."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.utils import seeding

from marl_ray.config.run.sections import EnvConfig
from marl_ray.envs.arrays import ArrayBatch
from marl_ray.envs.compiled.particle_physics import REFERENCE, SPREAD, TAG, Rules, observe, step_copies

if TYPE_CHECKING:
    from pettingzoo import ParallelEnv


WORLD_KINDS = {"mpe2.simple_spread_v3": SPREAD, "mpe2.simple_tag_v3": TAG, "mpe2.simple_reference_v3": REFERENCE}
COMPILED_ARGUMENTS = {
    "N",
    "local_ratio",
    "max_cycles",
    "num_good",
    "num_adversaries",
    "num_obstacles",
    "terminate_on_success",
}
"""Arguments that the compiled worlds read. With another value than its default in any other argument, a world runs in
the loop."""


def compiled_batch(
    config: EnvConfig, env: "ParallelEnv", copies: int, groups: Sequence[Sequence[str]], signals: int
) -> ArrayBatch | None:
    """Return the compiled batch of a config, as `copies.COMPILED_BATCHES` asks; None if it has to run in the loop."""
    if config.id not in WORLD_KINDS:
        return None
    defaults = _defaults(config.id)
    if not all(key in COMPILED_ARGUMENTS or value == defaults.get(key) for key, value in config.kwargs.items()):
        return None
    rules = _rules(WORLD_KINDS[config.id], defaults | config.kwargs)
    return ArrayBatch(
        env, copies, groups, signals, partial(_begin, rules=rules), step_copies, observe, parameters=(rules,)
    )


def _defaults(env_id: str) -> dict[str, Any]:
    import importlib

    parameters = inspect.signature(importlib.import_module(env_id).raw_env.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}


def _rules(kind: int, kwargs: dict[str, Any]) -> Rules:
    """Return the constants that mpe2 builds into a world's agents and landmarks.

    Sizes, accelerations, greatest speeds and the number of words are those with which the scenario of an id makes its
    world, such as in mpe2/simple_tag/simple_tag.py; what it does not set has the default of mpe2/_mpe_utils. They have no
    units.
    """
    if kind == TAG:
        chasers, landmarks = kwargs["num_adversaries"], kwargs["num_obstacles"]
        agents = chasers + kwargs["num_good"]
        chases = np.arange(agents) < chasers
        sizes = np.concatenate([np.where(chases, 0.075, 0.05), np.full(landmarks, 0.2)])
        force, speed = np.where(chases, 3.0, 4.0), np.where(chases, 1.0, 1.3)
    else:
        agents, landmarks, chasers = (kwargs["N"], kwargs["N"], 0) if kind == SPREAD else (2, 3, 0)
        sizes = np.concatenate([np.full(agents, 0.15 if kind == SPREAD else 0.05), np.full(landmarks, 0.05)])
        force, speed = np.full(agents, 5.0), np.full(agents, np.inf)
    collides = np.ones(agents + landmarks, bool)
    if kind != TAG:
        collides[agents if kind == SPREAD else 0 :] = False
    return Rules(
        kind=kind,
        agents=agents,
        landmarks=landmarks,
        chasers=chasers,
        words=10 if kind == REFERENCE else 2,
        local_ratio=float(kwargs.get("local_ratio", 1.0)),
        max_cycles=int(kwargs["max_cycles"]),
        ends_on_success=bool(kwargs.get("terminate_on_success", False)),
        sizes=sizes,
        collides=collides,
        force=force,
        speed=speed,
    )


def _begin(seed: int, rules: Rules) -> np.ndarray:
    """Return the state that the world's `reset(seed=seed)` draws."""
    draws, _ = seeding.np_random(seed)
    goals = [int(draws.integers(rules.landmarks)) for _ in range(rules.agents)] if rules.kind == REFERENCE else []
    agents, edge = rules.agents, 0.9 if rules.kind == TAG else 1.0
    state = np.zeros(2 * (agents + rules.landmarks) + (2 + rules.words + 1) * agents + 1)
    bounds = 2 * agents, 2 * (agents + rules.landmarks)
    state[: bounds[0]] = draws.uniform(-1, 1, bounds[0])
    state[bounds[0] : bounds[1]] = draws.uniform(-edge, edge, bounds[1] - bounds[0])
    if goals:
        state[-1 - agents : -1] = goals
    return state
