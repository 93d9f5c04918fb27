"""The actor-critic policy: a decentralised actor, and a local or central critic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymnasium import spaces
from torch import Tensor, nn

from marl_ray.config import NetworkConfig
from marl_ray.policies.distributions import Distribution, distribution_of
from marl_ray.policies.networks import Network


@dataclass(frozen=True)
class Prepared:
    """Inputs of one network, encoded once per batch: values (N, C) and, for one-hot codes, the columns they stand for."""

    values: Tensor
    columns: Tensor | None

    def rows(self, index: Tensor) -> "Prepared":
        return Prepared(self.values[index], self.columns)


class ActorCritic(nn.Module):
    """Actor on an agent's own observation; critic on the same (local) or on all agents' observations (central).

    A central critic has one output per agent that the policy plays, so one evaluation of the joint observation serves
    them all. One `forward` computes both, because under FSDP2 each call of the wrapped module is one gather of its weights.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        network: NetworkConfig,
        critic: Literal["local", "central"] = "local",
        state_space: spaces.Space[Any] | None = None,
        agents: int = 1,
    ):
        super().__init__()
        self.distribution: Distribution = distribution_of(action_space)
        self.actor = Network(observation_space, network, self.distribution.parameters, gain=0.01)
        self.central = critic == "central"
        critic_space = state_space if self.central and state_space is not None else observation_space
        self.critic = Network(critic_space, network, agents if self.central else 1, gain=1.0)

    def forward(self, actor_inputs: Sequence[Any], critic_inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Action parameters (N, P) and values (M, 1) or, from a central critic, (M, agents)."""
        return self.actor(*actor_inputs), self.critic(*critic_inputs)
