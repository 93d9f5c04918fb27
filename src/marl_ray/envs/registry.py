"""Environments by id. Importing this loads no environment package; `make_env` loads the one it needs."""

import copy
import difflib
import importlib
import inspect
import pkgutil
import re
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from marl_ray.closing import Unfinished
from marl_ray.config.run.sections import ConstraintConfig, EnvConfig
from marl_ray.errors import MarlRayError, did_you_mean, one_line
from marl_ray.extensions import ENVIRONMENT, REFERENCE, check_numbers, with_colon
from marl_ray.json_types import JsonObject

if TYPE_CHECKING:
    from pettingzoo import AECEnv, ParallelEnv

EXPECTED_IDS = (
    "a MultiGrid id (MultiGrid-Empty-8x8-v0)",
    "an mpe2 module (mpe2.simple_spread_v3)",
    "a Gymnasium id (gymnasium.CartPole-v1)",
    "an EnvPool id (envpool.CartPole-v1)",
    "a BrowserGym id (browsergym/miniwob.click-test)",
    REFERENCE,
)
_UNEXPECTED_KEYWORD = re.compile(
    r"(\w+)(?:\.__init__)?\(\) got an unexpected keyword argument '(.*?)'(?:\. Did you mean|$)"
)
"""Python's error: the function or class, and the name, which from a config may be any text."""
_NAMED_PARAMETERS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def make_env(config: EnvConfig, constraints: Sequence[ConstraintConfig] = ()) -> "ParallelEnv | AECEnv":
    """Return the environment of a config, held within the constraints' hard limits.

    The environment is a PettingZoo `ParallelEnv`, or an `AECEnv` where `is_text` says so. Raises MarlRayError naming
    `env.id`, `env.kwargs`, `env.cost` or `constraints`.
    """
    env = _make_env(config)
    limits = [constraint.hard_limit for constraint in constraints]
    if all(limit is None for limit in limits):
        return env
    with Unfinished() as unfinished:
        unfinished.keep(env)
        if is_text(env):
            raise MarlRayError(
                f"constraints: hard_limit needs actions that can be masked; those of {config.id} are texts"
            )
        from marl_ray.envs.budget.wrapper import HardBudget

        limited = HardBudget(env, limits)
        unfinished.pop_all()
    return limited


def check_reward(env: "ParallelEnv | AECEnv") -> None:
    """Let a user's reward pay for an episode of drawn texts, in an environment of texts.

    Raises MarlRayError if it fails.
    """
    if is_text(env):
        from marl_ray.envs.text.base import TextEnv

        if isinstance(env, TextEnv):
            env.check_reward()


def is_text(env: "ParallelEnv | AECEnv") -> bool:
    """Return True if agents of the environment take turns, read texts and write texts."""
    from pettingzoo import AECEnv

    return isinstance(env, AECEnv) and all(_spaces_are_text(env))


def _spaces_are_text(env: "ParallelEnv | AECEnv") -> list[bool]:
    """Say for each observation and action space if it is a text space. Needs no reset."""
    from gymnasium.spaces import Text

    makers = env.observation_space, env.action_space
    return [isinstance(make(agent), Text) for agent in env.possible_agents for make in makers]


def _make_env(config: EnvConfig) -> "ParallelEnv | AECEnv":
    env_id = config.id
    if env_id.startswith("MultiGrid-"):
        return _build(env_id, _gridworld(config), config.kwargs)
    if config.cost.collision or config.cost.action:
        raise MarlRayError(f"env.cost: only MultiGrid environments have priced costs; {env_id} reports its own")
    if env_id.startswith("mpe2."):
        return _build(env_id, _mpe2(env_id), config.kwargs)
    if env_id.startswith("gymnasium."):
        from marl_ray.envs.gymnasium_env import single_agent

        make = partial(single_agent, env_id.removeprefix("gymnasium."))
        return _accept_environment(env_id, _build(env_id, make, config.kwargs))
    if env_id.startswith("envpool."):
        from marl_ray.envs.envpool_env import EnvPoolEnv

        return _build(env_id, partial(EnvPoolEnv, env_id.removeprefix("envpool.")), config.kwargs)
    if env_id.startswith("browsergym/"):
        from marl_ray.envs.web.browsergym.environment import BrowserGym

        return _build(env_id, partial(BrowserGym, env_id), config.kwargs)
    return _accept_environment(env_id, _build(env_id, _import_environment(env_id), config.kwargs))


def check_costs(env: "ParallelEnv | AECEnv", signals: int) -> None:
    """Raise MarlRayError unless a step of the environment reports `signals` costs."""
    _, infos = first_step(env)
    sizes = [np.size(info["cost"]) for info in infos.values() if "cost" in info]
    if not sizes:
        raise MarlRayError('constraints: the environment reports no infos[agent]["cost"], so no budget can be kept')
    if set(sizes) != {signals}:
        raise MarlRayError(f'constraints: {signals} given, but infos[agent]["cost"] has {max(sizes)} numbers')


def first_step(env: "ParallelEnv | AECEnv") -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Return the rewards and infos of one step with drawn actions that are possible, after a reset."""
    first = env.reset(seed=0)
    for agent in env.agents:
        env.action_space(agent).seed(0)
    if is_text(env):
        env.step(env.action_space(env.agent_selection).sample())
        return env.rewards, env.infos
    _, infos = first
    actions = {}
    for agent in env.agents:
        space = env.action_space(agent)
        mask: Any = (infos.get(agent) or {}).get("action_mask")
        fits = np.shape(mask) == (getattr(space, "n", None),)  # playing refuses another mask by name
        actions[agent] = sample_action(space, np.asarray(mask, bool) if fits else None)
    _, rewards, _, _, infos = env.step(actions)
    return rewards, infos


def sample_action(space: Any, mask: Any) -> Any:
    """Return an action drawn from those that `mask` allows; from all, if it is None."""
    return space.sample() if mask is None else space.sample(np.asarray(mask, np.int8))


def _gridworld(config: EnvConfig) -> "Callable[..., ParallelEnv | AECEnv]":
    from marl_ray.envs.gridworld.environment import IDS, Gridworld

    if config.id not in IDS:
        raise MarlRayError(f"env.id: {config.id!r} is unknown{did_you_mean(config.id, IDS)}")
    return lambda **kwargs: Gridworld(config.id, config.cost, **kwargs)


def _mpe2(env_id: str) -> "Callable[..., ParallelEnv | AECEnv]":
    import mpe2

    ids = [f"mpe2.{module.name}" for module in pkgutil.iter_modules(mpe2.__path__) if "_v" in module.name]
    if env_id not in ids:
        raise MarlRayError(f"env.id: {env_id!r} is unknown{did_you_mean(env_id, ids)}")
    make: Callable[..., ParallelEnv | AECEnv] = importlib.import_module(env_id).parallel_env
    return make


def _import_environment(env_id: str) -> "Callable[..., ParallelEnv | AECEnv]":
    """Return the callable that a built-in id, a package's id or `package.module:NAME` names."""
    if ":" not in env_id and env_id not in ENVIRONMENT.names():
        suggestion = (
            with_colon(env_id)
            or _suggest_prefixed_id(env_id)
            or did_you_mean(env_id, ENVIRONMENT.names(), *EXPECTED_IDS)
        )
        raise MarlRayError(f"env.id: {env_id!r} is unknown{suggestion}")
    try:
        make: Callable[..., ParallelEnv | AECEnv] = ENVIRONMENT.load(env_id)
    except MarlRayError as error:
        raise MarlRayError(f"env.id: {error}") from error
    if not callable(make):
        raise MarlRayError(f"env.id: {env_id!r} is not callable, expected what returns an environment")
    return make


def _suggest_prefixed_id(env_id: str) -> str:
    """Return '; did you mean ...?' for an id of another package with a typo or without its prefix.

    The packages are Gymnasium, mpe2 and MultiGrid.
    """
    import gymnasium
    import mpe2

    from marl_ray.envs.gridworld.environment import IDS

    modules = [module.name for module in pkgutil.iter_modules(mpe2.__path__) if "_v" in module.name]
    ids = [*(f"gymnasium.{name}" for name in gymnasium.registry), *(f"mpe2.{name}" for name in modules), *IDS]
    last = env_id.replace("/", ".").rpartition(".")[2]
    close = [known for known in ids if known.rpartition(".")[2] == last]
    close = close or difflib.get_close_matches(env_id, ids, n=3, cutoff=0.75)
    return f"; did you mean {' or '.join(close[:3])}?" if close else ""


def _build(env_id: str, make: "Callable[..., ParallelEnv | AECEnv]", kwargs: JsonObject) -> "ParallelEnv | AECEnv":
    try:
        check_numbers(make, kwargs)
        return make(**copy.deepcopy(kwargs))  # an environment may change its arguments; the config stays
    except TypeError as error:
        unexpected = _UNEXPECTED_KEYWORD.search(str(error))
        if unexpected is None or unexpected[2] not in kwargs:
            raise MarlRayError(f"env.kwargs: {env_id} rejected {kwargs} ({one_line(error)})") from error
        arguments = _accepted_arguments(unexpected[1], make, error)
        instead = did_you_mean(unexpected[2], arguments) if arguments else ""
        raise MarlRayError(f"env.kwargs.{unexpected[2]}: {env_id} has no such argument{instead}") from error
    except (ValueError, AssertionError, KeyError) as error:
        # A bare `assert` has no text; its source line says more than its type.
        reason = one_line(error) if str(error) else traceback.extract_tb(error.__traceback__)[-1].line
        raise MarlRayError(f"env.kwargs: {env_id} rejected {kwargs} ({reason})") from error


def _accepted_arguments(name: str, make: Callable[..., object], error: TypeError) -> list[str]:
    """Return the arguments of the function or class of this name that has refused one, or else of `make`.

    A class may hand what it does not know to another: the frame that called the other has its name, and the arguments of
    every class on the way there come first.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    refusing = frames[-1].f_locals.get(name, frames[-1].f_globals.get(name, make))
    inits = [frame for frame in frames if frame.f_code.co_name == "__init__" and "self" in frame.f_locals]
    made = [type(frame.f_locals["self"]) for frame in inits]
    return list(dict.fromkeys(argument for part in (*made, refusing) for argument in _named_parameters(part)))


def _named_parameters(function: Callable[..., object]) -> list[str]:
    """Return the names by which a function takes arguments; empty for one that is written in C."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.kind in _NAMED_PARAMETERS]


def _accept_environment(env_id: str, env: "ParallelEnv | AECEnv") -> "ParallelEnv | AECEnv":
    """Return the environment if it is a parallel one or one of texts, converted if it takes turns otherwise.

    Any other is refused, and closed.
    """
    with Unfinished() as unfinished:
        if callable(getattr(env, "close", None)):
            unfinished.keep(env)
        accepted = _as_parallel_or_text(env_id, env)
        unfinished.pop_all()
    return accepted


def _as_parallel_or_text(env_id: str, env: "ParallelEnv | AECEnv") -> "ParallelEnv | AECEnv":
    """Return what `_accept_environment` does. Raises MarlRayError for an environment that is neither."""
    from pettingzoo import AECEnv
    from pettingzoo.utils.conversions import aec_to_parallel

    methods = ("observation_space", "action_space", "reset", "step")
    missing = [name for name in methods if not callable(getattr(env, name, None))]
    if not hasattr(env, "possible_agents"):
        missing.insert(0, "possible_agents")
    if missing:
        kind = type(env).__name__
        raise MarlRayError(f"env.id: {env_id} returned {kind}, not a PettingZoo environment: no {', '.join(missing)}")
    if is_text(env):
        return env
    if any(_spaces_are_text(env)):
        raise MarlRayError(
            f"env.id: {env_id} has Text spaces; expected an AECEnv in which every observation and action space is Text"
        )
    if isinstance(env, AECEnv):
        try:
            return aec_to_parallel(env)
        except AssertionError as error:
            raise MarlRayError(f"env.id: {env_id} cannot be run in parallel ({one_line(error)})") from error
    return env
