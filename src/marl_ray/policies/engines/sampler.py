"""Sampling responses from a token policy."""

from typing import TYPE_CHECKING

from marl_ray.errors import MarlRayError
from marl_ray.extensions import ENGINE
from marl_ray.policies.engines.base import Completion, Engine, Prompt, Token

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

__all__ = ["Completion", "Engine", "Prompt", "Token", "make_engine"]


def make_engine(policy: "TokenPolicy") -> Engine:
    """The engine that `policy.generation.engine` names.

    It samples from the policy's weights as they are at the time of a call, so a refresh in place needs no new engine.
    Raises MarlRayError where the engine cannot run here.
    """
    try:
        make = ENGINE.load(policy.generation.engine)
    except MarlRayError as error:
        raise MarlRayError(f"generation.engine: {error}") from error
    engine: Engine = make(policy)
    return engine
