"""The arms of an experiment, loaded."""

from typing import TYPE_CHECKING, TypeAlias

from marl_ray.config import ExperimentConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundle import Bundle
from marl_ray.policies.manifest import pinned
from marl_ray.serving.arms.passes import Answer, Observations, Passes

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from marl_ray.policies.token_bundle import TokenBundle

AnyBundle: TypeAlias = "Bundle | TokenBundle"


def pin(config: ExperimentConfig, tracking_uri: str | None) -> ExperimentConfig:
    """The experiment with the versions that its arms' aliases (`models:/name@best`) have now.

    What is served must not change when an alias moves. Raises MarlRayError naming the arm.
    """
    arms = {}
    for name, arm in config.arms.items():
        try:
            arms[name] = arm.model_copy(update={"bundle": pinned(arm.bundle, tracking_uri)})
        except MarlRayError as error:
            raise MarlRayError(f"experiments.{config.name}.arms.{name}: {error}") from error
    return config.model_copy(update={"arms": arms})


def is_text(bundle: AnyBundle) -> "TypeIs[TokenBundle]":
    """Whether it holds language models."""
    return bundle.manifest.family == "token"


class ArmBatcher:
    """An arm in this process, whose requests share forward passes (`passes`) with those of its experiment's other arms."""

    def __init__(self, bundle: Bundle, passes: Passes):
        self.bundle = bundle
        self._passes = passes
        passes.join(bundle)

    async def act(self, observations: Observations, greedy: bool, masks: Observations | None = None) -> Answer:
        """Actions and log-probabilities for one request; `masks` are its agents' allowed actions, as far as given.

        ArmError if the pass fails, NotFiniteError if a log-probability is not finite."""
        return await self._passes.act(self.bundle, observations, greedy, masks or {})

    def close(self) -> None:
        self._passes.leave(self.bundle)
