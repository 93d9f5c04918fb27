"""The choice of an engine: the one that a config names is made for a policy."""

from typing import TYPE_CHECKING, Protocol

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ENGINE
from marl_ray.policies.engines.base import Engine

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy


class EngineClass(Protocol):
    """A class of engines, each of which is made from a policy."""

    def __call__(self, policy: "TokenPolicy") -> Engine:
        """Make the engine of a policy. Raises MarlRayError if it cannot run here."""

    def has_weights(self, generation: GenerationConfig) -> bool:
        """See `Engine.has_weights`."""


def has_weights(generation: GenerationConfig) -> bool:
    """Return True if the engine that `generation` names has a policy's weights itself.

    Such an engine needs no copy of them beside it. Raises MarlRayError if there is no such engine.
    """
    return _engine_of(generation).has_weights(generation)


def make_engine(policy: "TokenPolicy") -> Engine:
    """Return the engine that `policy.generation.engine` names.

    The engine samples from the policy's weights as they are at the time of a call, so a refresh in place needs no new
    engine. Raises MarlRayError where the engine cannot run here.
    """
    return _engine_of(policy.generation)(policy)


def _engine_of(generation: GenerationConfig) -> EngineClass:
    """Return the engine's class. Raises MarlRayError if there is no such engine."""
    try:
        engine: EngineClass = ENGINE.load(generation.engine)
    except MarlRayError as error:
        raise MarlRayError(f"generation.engine: {error}") from error
    # A variable of its own: in the condition, mypy would take `engine` for type[Engine], which is made without a policy.
    is_engine = isinstance(engine, type) and issubclass(engine, Engine)
    if not is_engine:
        raise MarlRayError(
            f"generation.engine: {generation.engine!r} is no engine, expected a class derived from Engine"
        )
    return engine
