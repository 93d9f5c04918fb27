"""Sampling responses from a token policy."""

from typing import TYPE_CHECKING

from marl_ray.policies.engines.base import Completion, Engine, Prompt, Token

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

__all__ = ["Completion", "Engine", "Prompt", "Token", "make_engine"]


def make_engine(policy: "TokenPolicy") -> Engine:
    """The engine that `policy.generation.engine` names.

    It samples from the policy's weights as they are at the time of a call, so a refresh in place needs no new engine.
    Raises MarlRayError where the engine cannot run here.
    """
    match policy.generation.engine:
        case "torch":
            from marl_ray.policies.engines.torch_engine import TorchEngine

            return TorchEngine(policy)
        case "transformers":
            from marl_ray.policies.engines.transformers_engine import PagedEngine

            return PagedEngine(policy)
        case "vllm":
            from marl_ray.policies.engines.vllm_engine import VllmEngine

            return VllmEngine(policy)
