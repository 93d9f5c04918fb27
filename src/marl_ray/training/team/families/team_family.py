"""The interface of a family of teams, and the choice of one.

The modules `actor_critic_teams` and `language_teams` have it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from pettingzoo import ParallelEnv
from torch.distributed.device_mesh import DeviceMesh

from marl_ray.config import RunConfig
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.team.members import Team

if TYPE_CHECKING:  # the imports take seconds, and actor-critics do not need them
    from marl_ray.training.team.members import EngineOf, PolicyModel


class TeamFamily(Protocol):
    """The functions of a family's module."""

    def build_models(
        self, config: RunConfig, env: ParallelEnv, agents: Mapping[str, list[str]]
    ) -> "Mapping[str, PolicyModel]":
        """Make the policies of these agents (policy -> agents), equal on every worker.

        The policies have the weights of `team.NAME.bundle` if the config names one.
        """

    def horizon(self, config: RunConfig, name: str) -> int:
        """Return the greatest number of steps of a policy's sequences."""

    def engine_has_weights(self, config: RunConfig, name: str) -> bool:
        """Return True if the engine that samples from a policy has the weights itself.

        Then no worker needs a copy that samples.
        """

    def has_other_engine(self, config: RunConfig, name: str) -> bool:
        """Return True if the engine that samples from a policy computes with other code than the policy's modules."""

    def assemble(
        self,
        config: RunConfig,
        agents: dict[str, list[str]],
        models: "Mapping[str, PolicyModel]",
        learners: dict[str, Learner],
        mesh: DeviceMesh,
        engine_of: "EngineOf | None",
    ) -> Team:
        """Make the team of models and their learners, with the engines that sample.

        `engine_of` is as in `build_team`.
        """


def team_family(config: RunConfig) -> TeamFamily:
    """Return the family of a run's team."""
    if config.has_language_models:
        from marl_ray.training.team.families import language_teams  # loads transformers

        return language_teams
    from marl_ray.training.team.families import actor_critic_teams

    return actor_critic_teams
