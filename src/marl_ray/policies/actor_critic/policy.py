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
class EncodedRows:
    """Inputs of one network, encoded once per batch and reused by every epoch."""

    values: Tensor
    """(U, C) inputs of the first layer."""
    columns: Tensor | None
    """(C,) for one-hot codes: the numbers of the code's columns that `values` holds; None for other rows."""
    index: Tensor | None
    """(N,) the number of the evaluated row that equals each row of the batch; None if all rows are evaluated."""

    @classmethod
    def from_rows(cls, network: Network, rows: Tensor) -> "EncodedRows":
        """Encode the rows (N, D) of a batch for `network`."""
        if not network.categorical:
            return cls(*network.prepare(rows), None)
        distinct, index = distinct_rows(rows)
        return cls(*network.prepare(distinct), index)

    def rows(self, positions: Tensor) -> "EncodedRows":
        """Return the part of the batch at these `positions`."""
        if self.index is None:
            return EncodedRows(self.values[positions], self.columns, None)
        used, index = torch.unique(self.index[positions], return_inverse=True)
        return EncodedRows(self.values[used], self.columns, index)

    def expand(self, outputs: Tensor) -> Tensor:
        """Copy the outputs (U, ...) of the evaluated rows to the rows of the batch, (N, ...)."""
        return outputs if self.index is None else outputs[self.index]


class ActorCritic(nn.Module):
    """An actor that reads an agent's own observation, and its critics.

    The critics read the same (local) or all agents' observations (central). A central critic has one set of outputs for
    each agent that the policy plays, so one evaluation of the joint observation serves all of them. The cost critic is
    a network of its own with one output per cost signal. One `forward` computes everything, because under FSDP2 each
    call of the wrapped module gathers its weights.
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

        # The critic's first outputs are near zero. Noise of the size of the returns would enter the first targets
        # through bootstrapping.
        self.critic = Network(critic_space, network, heads, gain=0.01) if critic != "none" else None
        self.cost_critic = Network(critic_space, network, heads * signals, gain=0.01) if signals else None

    @property
    def critics(self) -> list[Network]:
        """The critic and the cost critic, as far as the policy has them."""
        return [network for network in (self.critic, self.cost_critic) if network is not None]

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the raw action parameters (U, P), then each critic's values, (V, heads) or (V, heads * signals).

        `inputs` are the actor's values and columns, then the critics'. All of them are plain tensors, because FSDP2
        looks for tensors among the arguments.
        """
        actor_values, actor_columns, critic_values, critic_columns = inputs
        return (
            self.actor(actor_values, actor_columns),
            *(critic(critic_values, critic_columns) for critic in self.critics),
        )

    def evaluate(self, actor: EncodedRows, critic: EncodedRows, allowed: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the normalised action parameters (N, P) and values of whole batches, with gradients.

        `allowed` is (N, choices).
        """
        outputs, *values = self(actor.values, actor.columns, critic.values, critic.columns)
        if allowed is None:  # each distinct row is normalised once
            outputs = actor.expand(self.distribution.normalize(outputs))
        else:
            outputs = self.distribution.normalize(actor.expand(outputs), allowed)
        return (outputs, *(critic.expand(value) for value in values))
