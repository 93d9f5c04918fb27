"""The choice of an engine: the one that a config names is made for a policy."""

from typing import TYPE_CHECKING

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ENGINE
from marl_ray.policies.engines.base import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from marl_ray.policies.language.token_policy import TokenPolicy


def has_weights(generation: GenerationConfig) -> bool:
    """Return True if the engine that `generation` names has a policy's weights itself.

    Such an engine needs no copy of them beside it. Raises MarlRayError if there is no such engine.
    """
    has = getattr(_engine_of(generation), "has_weights", None)
    return has is not None and bool(has(generation))


def make_engine(policy: "TokenPolicy") -> Engine:
    """Return the engine that `policy.generation.engine` names.

    The engine samples from the policy's weights as they are at the time of a call, so a refresh in place needs no new
    engine. Raises MarlRayError where the engine cannot run here.
    """
    return _engine_of(policy.generation)(policy)


def _engine_of(generation: GenerationConfig) -> "Callable[[TokenPolicy], Engine]":
    try:
        engine: Callable[[TokenPolicy], Engine] = ENGINE.load(generation.engine)
        return engine
    except MarlRayError as error:
        raise MarlRayError(f"generation.engine: {error}") from error
