"""The actor-critic policy: a decentralised actor, and a local or central critic."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn

from marl_ray.config import NetworkConfig
from marl_ray.policies.actor_critic.distinct_rows import distinct_rows
from marl_ray.policies.actor_critic.distributions import Distribution, distribution_of
from marl_ray.policies.actor_critic.networks import Network


@dataclass(frozen=True)
class Prepared:
    """Inputs of one network, encoded once per batch and reused by every epoch."""

    values: Tensor
    """(U, C) inputs of the first layer."""
    columns: Tensor | None
    """(C,) for one-hot codes: which columns of the code `values` holds."""
    index: Tensor | None
    """(N,) which of the U evaluated rows stands for each row of the batch; None where they are the batch's rows."""

    @classmethod
    def from_rows(cls, network: Network, rows: Tensor) -> "Prepared":
        """Rows (N, D) of a batch."""
        if not network.categorical:
            return cls(*network.prepare(rows), None)
        distinct, index = distinct_rows(rows)
        return cls(*network.prepare(distinct), index)

    def rows(self, chosen: Tensor) -> "Prepared":
        """The part of the batch at the positions `chosen`."""
        if self.index is None:
            return Prepared(self.values[chosen], self.columns, None)
        used, index = torch.unique(self.index[chosen], return_inverse=True)
        return Prepared(self.values[used], self.columns, index)

    def spread(self, outputs: Tensor) -> Tensor:
        """Outputs (U, ...) of the evaluated rows as outputs (N, ...) of the batch's rows."""
        return outputs if self.index is None else outputs[self.index]


class ActorCritic(nn.Module):
    """Actor on an agent's own observation; critics on the same (local) or on all agents' observations (central).

    A central critic has its outputs once per agent that the policy plays, so one evaluation of the joint observation serves
    them all. A cost critic has one output per cost signal, in a network of its own. One `forward` computes all, because
    under FSDP2 each call of the wrapped module is one gather of its weights.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        network: NetworkConfig,
        critic: Literal["none", "local", "central"] = "local",
        state_space: spaces.Space[Any] | None = None,
        agents: int = 1,
        signals: int = 0,
    ):
        """`signals` cost signals get a critic."""
        super().__init__()
        self.distribution: Distribution = distribution_of(action_space)
        self.actor = Network(observation_space, network, self.distribution.parameters, gain=0.01)
        self.central = critic == "central"
        critic_space = state_space if self.central and state_space is not None else observation_space
        heads = agents if self.central else 1

        # Near zero: noise of the size of the returns would be bootstrapped into the first targets and followed.
        self.critic = Network(critic_space, network, heads, gain=0.01) if critic != "none" else None
        self.cost_critic = Network(critic_space, network, heads * signals, gain=0.01) if signals else None

    @property
    def critics(self) -> list[Network]:
        """The networks besides the actor."""
        return [network for network in (self.critic, self.cost_critic) if network is not None]

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Raw action parameters (U, P), then of each critic the values (V, heads) or (V, heads * signals).

        `inputs` are the actor's values and columns, then the critics'. (Plain tensors: FSDP2 looks into them.)
        """
        actor_values, actor_columns, critic_values, critic_columns = inputs
        return (
            self.actor(actor_values, actor_columns),
            *(critic(critic_values, critic_columns) for critic in self.critics),
        )

    def evaluate(self, actor: Prepared, critic: Prepared, allowed: Tensor | None = None) -> tuple[Tensor, ...]:
        """Normalised action parameters (N, P) and values of whole batches, with gradients; `allowed` (N, choices)."""
        outputs, *values = self(actor.values, actor.columns, critic.values, critic.columns)
        if allowed is None:  # normalised once per distinct row
            outputs = actor.spread(self.distribution.normalize(outputs))
        else:
            outputs = self.distribution.normalize(actor.spread(outputs), allowed)
        return (outputs, *(critic.spread(value) for value in values))
