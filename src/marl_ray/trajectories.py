"""The one data layout, B decision sequences of T steps."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

PER_SEQUENCE = ("greedy", "group", "episode", "agent", "turn")
"""Fields with one value for each sequence."""


@dataclass(frozen=True)
class Trajectories:
    """`(B, T)` tensors of one policy's experience.

    For an actor-critic a sequence is one agent of one environment copy, and a step is an environment step; row
    `copy * agents + agent` belongs to agent number `agent` (in the policy's order) of copy number `copy`. A row may hold
    several episodes, one after another; `terminated` and `truncated` mark their last steps. For a token policy a sequence
    is one response and a step is a token.
    """

    observations: Tensor
    """(B, T, D) flat observation rows (`policies.actor_critic.spaces.to_row`)."""
    states: Tensor | None
    """(B / agents, T, S) joint observations for a central critic, one per environment copy; None for a local critic."""
    actions: Tensor
    """(B, T, ...); an action's own shape comes last."""
    log_probs: Tensor
    """(B, T) log-probability of the action under the policy that took it, from the sampling pass."""
    action_masks: Tensor | None
    """(B, T, choices) bool: allowed actions; None if the environment masks nothing."""
    values: Tensor
    """(B, T) the critic's estimate at the step, in reward units; 0 without a critic."""
    bootstrap: Tensor
    """(B, T) the critic's estimate after the step where the row stops there without an end (a truncation, or the last
    step), else 0."""
    cost_values: Tensor
    """(B, T, K) the cost critic's estimates, in cost units; 0 without one."""
    cost_bootstrap: Tensor
    """(B, T, K) likewise for the cost critic, where the team's episode is truncated; for an agent that is done before, the
    mean of the estimates of the agents that continue."""
    rewards: Tensor
    """(B, T) the agent's reward of the step."""
    costs: Tensor
    """(B, T, K) constraint costs of the whole team: a budget is the team's, so every member feels every cost."""
    mask: Tensor
    """(B, T) bool: True where this policy decided. A forced move (one action allowed) is no decision."""
    terminated: Tensor
    """(B, T) bool: the sequence's episode ended by its rules; nothing follows."""
    truncated: Tensor
    """(B, T) bool: the episode was truncated (a time limit); `bootstrap` stands for what would have followed."""
    greedy: Tensor
    """(B,) bool: played greedily, as a baseline for its group; not trained on."""
    group: Tensor
    """(B,) int64: index of the start; sequences with the same one share it (the same layout; a prompt)."""
    episode: Tensor
    """(B,) int64: the episode the row begins in."""
    agent: Tensor
    """(B,) int64: index of the agent within the policy's agents."""
    turn: Tensor
    """(B,) int64: turn within the episode for token policies, else 0."""
    team_terminated: Tensor | None = None
    """(B, T) bool: the team's episode ended by its rules, so that no more costs follow; later than `terminated` of an agent
    that is done before the others. None: the same as `terminated`."""
    team_truncated: Tensor | None = None
    """(B, T) bool: the team's episode was truncated. None: the same as `truncated`."""
    prompts: Tensor | None = None
    """(B, P) int64: token ids that the response followed, on the right, -1 before them; None for actor-critics, whose
    `observations` hold their inputs (a token policy's have D = 0)."""

    def __post_init__(self) -> None:
        batch, steps = self.log_probs.shape
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("states", "prompts") or value is None:
                continue
            expected = (batch,) if field.name in PER_SEQUENCE else (batch, steps)
            if tuple(value.shape[: len(expected)]) != expected:
                raise ValueError(f"trajectories.{field.name}: expected shape {expected}, got {tuple(value.shape)}")

    @property
    def agents(self) -> int:
        """Rows per environment copy: the agents that the policy plays; 1 for a token policy, whose rows are responses."""
        if self.prompts is not None:
            return 1
        return int(self.agent.max()) + 1

    def to(self, device: torch.device) -> "Trajectories":
        """Return the same trajectories on another device."""
        moved: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            moved[field.name] = None if value is None else value.to(device)
        return Trajectories(**moved)
