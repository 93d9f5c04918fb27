"""Checks environments of vectors, images or texts for what training relies on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from marl_ray.closing import Unfinished
from marl_ray.config.run.sections import EnvConfig
from marl_ray.conformance.extensions.properties import CheckedProperty, check_property
from marl_ray.envs.batch import BatchStep, EnvBatch, EpisodeMetrics
from marl_ray.envs.copies import EnvLoop, make_batch
from marl_ray.envs.registry import is_text, make_env, sample_action
from marl_ray.policies.actor_critic.spaces import row_dtype, row_size, space_to_json

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv


SEED = 7
"""Seed of the first episode, which the others count up from; any would do."""
EPISODES = 3
"""Episodes that are played: later ones show what a reset leaves of the episode before."""
MAX_STEPS = 10_000
"""Steps after which an episode of drawn actions counts as endless."""
COPIES, BATCH_STEPS = 3, 200
"""Copies of a batch that is compared with the loop, and most steps of each of its episodes."""
FEW_STEPS = 50
"""Steps that `first_fault` plays."""


class AgentStep(NamedTuple):
    """One step as its agents see it, by agent; an environment of texts gives the observation of one agent alone."""

    observations: Mapping[str, Any]
    rewards: Mapping[str, float]
    infos: Mapping[str, Mapping[str, Any]]


def check(name: str, settings: Mapping[str, object]) -> Iterator[CheckedProperty]:
    """Play episodes of drawn actions; `settings` are `env.kwargs`."""
    config = EnvConfig(id=name, kwargs=dict(settings))
    with Unfinished() as unfinished:
        env = unfinished.keep(make_env(config))
        yield from _check_without_steps(env)
        yield from _check_episodes(env, config, EPISODES, MAX_STEPS)
        unfinished.pop_all()
    yield _check_close(env)


def first_fault(config: EnvConfig) -> CheckedProperty | None:
    """Return the first property that fails within a few steps of one episode; None if none does.

    An environment of texts is not played, because its rewards may cost money.
    """
    with Unfinished() as unfinished:
        env = unfinished.keep(make_env(config))
        properties = _check_without_steps(env)
        if not is_text(env):
            properties = chain(properties, _check_episodes(env, config, 1, FEW_STEPS))
        fault = next((checked for checked in properties if checked.failure is not None), None)
        unfinished.pop_all()
    closed = _check_close(env)  # after a fault, too
    return closed if fault is None and closed.failure is not None else fault


def _check_without_steps(env: "ParallelEnv | AECEnv") -> Iterator[CheckedProperty]:
    """Yield the properties that need no step."""
    yield check_property("agents", "possible_agents lists every agent once", lambda: _check_agents(env))
    yield check_property(
        "spaces", "an agent's spaces stay the same, and policies support them", lambda: _check_spaces(env)
    )


def _check_episodes(
    env: "ParallelEnv | AECEnv", config: EnvConfig, count: int, max_steps: int
) -> Iterator[CheckedProperty]:
    """Yield the properties of `count` episodes of at most `max_steps` steps."""
    episodes: list[list[AgentStep]] = []

    def play() -> str | None:
        for number in range(count):
            episodes.append(_play_episode(env, SEED + number, max_steps))
            if len(episodes[-1]) > MAX_STEPS:
                return f"an episode of drawn actions is not over after {MAX_STEPS} steps"
        return None

    played = check_property("episodes", "a reset begins an episode, steps end it, and another may begin", play)
    yield played
    if played.failure is not None:
        return
    steps = [step for episode in episodes for step in episode]
    yield check_property(
        "observations", "every observation is in its agent's space", lambda: _check_observations(env, steps)
    )
    yield check_property("rewards", "every reward, cost and metric is a finite number", lambda: _check_numbers(steps))
    yield check_property(
        "seeds",
        "another copy with the same seed and actions gives the same",
        lambda: _check_seeds(config, episodes[0], max_steps),
    )
    if not is_text(env) and callable(getattr(env, "batch", None)):
        signals = max(
            [np.size(info["cost"]) for step in steps for info in step.infos.values() if "cost" in info] or [1]
        )
        yield check_property(
            "batch",
            "its batch gives what reset and step give",
            lambda: _check_batch(config, list(env.possible_agents), signals, min(max_steps, BATCH_STEPS)),
        )


def _check_close(env: "ParallelEnv | AECEnv") -> CheckedProperty:
    def close() -> None:
        env.close()

    return check_property("close", "an environment that is no longer needed closes", close)


def _check_agents(env: "ParallelEnv | AECEnv") -> str | None:
    agents = list(env.possible_agents)
    if not agents:
        return "possible_agents is empty"
    if not all(isinstance(agent, str) for agent in agents):
        return f"expected names as text, got {agents}"
    return f"expected each once, got {agents}" if len(set(agents)) < len(agents) else None


def _check_spaces(env: "ParallelEnv | AECEnv") -> str | None:
    for agent in env.possible_agents:
        for kind in ("observation_space", "action_space"):
            space = getattr(env, kind)(agent)
            if space is not getattr(env, kind)(agent):
                return (
                    f"{kind}({agent!r}) makes a new space at every call, whose draws would repeat: expected the same "
                    "object, which __init__ may make"
                )
            if not is_text(env):
                space_to_json(space)
    return None


def _play_episode(env: "ParallelEnv | AECEnv", seed: int, max_steps: int) -> list[AgentStep]:
    """Play an episode of drawn actions, or its first `max_steps` steps, and return its steps, the reset first."""
    # Asked for once: an environment may make a new space, without a seed, at every call.
    spaces = {agent: env.action_space(agent) for agent in env.possible_agents}
    for space in spaces.values():
        space.seed(seed)
    return (
        _play_text_episode(env, spaces, seed, max_steps)
        if is_text(env)
        else _play_parallel_episode(env, spaces, seed, max_steps)
    )


def _play_parallel_episode(
    env: "ParallelEnv | AECEnv", spaces: Mapping[str, object], seed: int, max_steps: int
) -> list[AgentStep]:
    observations, infos = env.reset(seed=seed)
    if set(observations) != set(env.agents):
        raise ValueError(f"reset returned observations of {sorted(observations)} and has agents {sorted(env.agents)}")
    steps = [AgentStep(observations, {}, infos)]
    while env.agents and len(steps) <= max_steps:
        agents = list(env.agents)
        actions = {agent: sample_action(spaces[agent], infos.get(agent, {}).get("action_mask")) for agent in agents}
        observations, rewards, terminated, truncated, infos = env.step(actions)
        for part, values in {"rewards": rewards, "terminations": terminated, "truncations": truncated}.items():
            if missing := set(agents) - set(values):
                raise ValueError(f"step returned no {part} of {', '.join(sorted(missing))}")
        steps.append(AgentStep(observations, rewards, infos))
        remaining = {agent for agent in agents if not (terminated[agent] or truncated[agent])}
        if wrong := remaining ^ set(env.agents):
            raise ValueError(f"{', '.join(sorted(wrong))}: `agents` and the ends that step returned differ")
    return steps


def _play_text_episode(
    env: "ParallelEnv | AECEnv", spaces: Mapping[str, Any], seed: int, max_steps: int
) -> list[AgentStep]:
    env.reset(seed=seed)
    steps: list[AgentStep] = []
    while env.agents and len(steps) <= max_steps:
        agent = env.agent_selection
        observation, _, terminated, truncated, _ = env.last()
        steps.append(AgentStep({agent: observation}, dict(env.rewards), {a: dict(i) for a, i in env.infos.items()}))
        env.step(None if terminated or truncated else spaces[agent].sample())
    return steps


def _check_observations(env: "ParallelEnv | AECEnv", steps: Sequence[AgentStep]) -> str | None:
    for number, step in enumerate(steps):
        for agent, observation in step.observations.items():
            space = env.observation_space(agent)
            fits = isinstance(observation, str) if is_text(env) else space.contains(observation)
            if not fits:
                text = _short_text(observation)
                return f"step {number}: the observation {text} of {agent} is not in {_space_text(observation, space)}"
    return None


def _check_numbers(steps: Sequence[AgentStep]) -> str | None:
    for number, step in enumerate(steps):
        numbers = {f"the reward of {agent}": reward for agent, reward in step.rewards.items()}
        numbers |= {f"the cost of {agent}": info["cost"] for agent, info in step.infos.items() if "cost" in info}
        for name, value in numbers.items():
            if not np.isfinite(np.asarray(value, float)).all():
                return f"step {number}: {name} is {value!r}"
        for agent, info in step.infos.items():
            if "metrics" in info:
                EpisodeMetrics().add(agent, info["metrics"])
    return None


def _check_seeds(config: EnvConfig, first: Sequence[AgentStep], max_steps: int) -> str | None:
    with closing(make_env(config)) as env:
        again = _play_episode(env, SEED, max_steps)
    for number, (step, repeated) in enumerate(zip(first, again, strict=False)):
        for part in ("observations", "rewards"):
            if not _are_equal(getattr(step, part), getattr(repeated, part)):
                return f"step {number}: {part} differ between two copies that were reset with seed {SEED}"
    return None if len(first) == len(again) else f"episodes of {len(first)} and {len(again)} steps from one seed"


def _check_batch(config: EnvConfig, agents: Sequence[str], signals: int, max_steps: int) -> str | None:
    """Return the first difference between the environment's own batch and the loop over single ones; None if there is none.

    Both play episodes of drawn actions, with a policy for each agent, and with one for all agents of the same spaces,
    the last of them first.
    """
    with closing(make_env(config)) as env:
        kinds: dict[str, list[str]] = {}
        for agent in reversed(agents):
            kinds.setdefault(f"{env.observation_space(agent)} {env.action_space(agent)}", []).append(agent)
    single = [[agent] for agent in agents]
    for groups in [single, list(kinds.values())][: 1 + (len(kinds) < len(agents))]:
        with (
            closing(make_batch(config, COPIES, groups, signals)) as batch,
            closing(EnvLoop(config, COPIES, groups, signals)) as loop,
        ):
            difference = _batch_difference(batch, loop, max_steps)
        if difference is not None:
            shared = max(groups, key=len)
            return difference if groups is single else f"{difference}, where one policy plays {', '.join(shared)}"
    return None


def _batch_difference(tested: EnvBatch, loop: EnvLoop, max_steps: int) -> str | None:
    """Return what differs between a batch and the loop in episodes of drawn actions; None if nothing does."""
    batches = tested, loop
    spaces = [loop.envs[0].observation_space(group[0]) for group in loop.groups]
    shapes = [(COPIES, len(group), row_size(space)) for group, space in zip(loop.groups, spaces, strict=True)]
    rng = np.random.default_rng(SEED)
    for number in range(EPISODES):
        for batch in batches:
            for copy in range(COPIES):
                batch.reset(copy, SEED + number * COPIES + copy)
        for step in range(max_steps):
            rows = [
                [np.zeros(shape, row_dtype(space)) for shape, space in zip(shapes, spaces, strict=True)]
                for _ in batches
            ]
            for batch, observed_rows in zip(batches, rows, strict=True):
                batch.observe(observed_rows, np.flatnonzero(batch.alive.any(1)).tolist())
            actions = _draw_actions(loop, rng)
            pairs = {"observations": rows, "agents": [[batch.alive.copy()] for batch in batches]}
            pairs["action masks"] = [_copy_masks(batch.action_masks) for batch in batches]
            steps = [batch.step(actions) for batch in batches]
            for k, name in enumerate(BatchStep._fields):
                pairs[name] = [[batch_step[k]] for batch_step in steps]
            for name, (compiled, single) in pairs.items():
                for array, expected in zip(compiled, single, strict=True):
                    if array.shape != expected.shape or not np.allclose(array, expected, 1e-5, 1e-5):
                        return f"episode {number}, step {step}: {name} differ from those of `reset` and `step`"
            if not loop.alive.any():
                break
        for copy in np.flatnonzero(~loop.alive.any(1)).tolist():
            means, of_infos = tested.metrics(copy), loop.metrics(copy)
            if means.keys() != of_infos.keys() or not np.allclose(
                [means[name] for name in of_infos], [*of_infos.values()]
            ):
                return f"episode {number}: its metrics are {means}, expected {of_infos} of infos[agent]['metrics']"
    return None


def _draw_actions(loop: EnvLoop, rng: np.random.Generator) -> list[np.ndarray]:
    """Return (COPIES, agents of the group, *action shape) per group, drawn from the actions that are possible."""
    actions = []
    for group, masks in zip(loop.groups, loop.action_masks, strict=True):
        space = loop.envs[0].action_space(group[0])
        space.seed(int(rng.integers(2**31)))
        allowed = np.full((COPIES, len(group)), None) if masks is None else masks
        actions.append(np.array([[sample_action(space, mask) for mask in of_copy] for of_copy in allowed]))
    return actions


def _copy_masks(masks: Sequence[np.ndarray | None]) -> list[np.ndarray]:
    return [np.zeros(0) if mask is None else mask.copy() for mask in masks]


def _are_equal(values: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return values.keys() == others.keys() and all(
        np.array_equal(np.asarray(value), np.asarray(others[agent])) for agent, value in values.items()
    )


def _space_text(observation: Any, space: Any) -> str:
    """Return the space, and the kind or shape of an array that does not fit it, which its numbers do not show."""
    if isinstance(observation, np.ndarray) and space.shape is not None:
        if not np.can_cast(observation.dtype, space.dtype):
            return f"{space}: its dtype is {observation.dtype}, expected {space.dtype}"
        if observation.shape != space.shape:
            return f"{space}: its shape is {observation.shape}, expected {space.shape}"
    return str(space)


def _short_text(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
