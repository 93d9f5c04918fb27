"""Turn the responses of one policy into Trajectories: a row per response, a step per token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.policies.engines.base import Engine
from marl_ray.policies.language.padding import pad_sequences
from marl_ray.policies.language.token_policy import TokenPolicy
from marl_ray.rollout.text.episode import EpisodeTurn
from marl_ray.trajectories import Trajectories


@dataclass(frozen=True)
class TokenPlayer:
    """One language model as the collector needs it.

    A player has the weights and the engine that sample, its agents, and its value normalisers.
    """

    policy: TokenPolicy
    """The copy of the policy that samples. Its critic heads, if it has any, estimate the values of responses."""
    engine: Engine
    agents: list[str]
    value_norm: ValueNorm
    cost_norms: tuple[ValueNorm, ...] = ()
    micro_batch: int = 16
    """Number of responses whose values are estimated in one pass; it changes no result."""


class ResponseRow(NamedTuple):
    """A response, its environment copy and its group."""

    turn: EpisodeTurn
    copy: int
    group: int
    greedy: bool


def to_trajectories(player: TokenPlayer, rows: Sequence[ResponseRow], signals: int) -> Trajectories:
    """Make the batch of one policy.

    B is len(rows), which may be 0; T and P are the lengths of the longest response and prompt.
    """
    completions = [row.turn.completion for row in rows]
    prompts, actions, mask = pad_sequences(
        [row.turn.prompt for row in rows], [completion.ids for completion in completions]
    )
    batch, steps = mask.shape
    log_probs = torch.zeros(batch, steps)
    for b, completion in enumerate(completions):
        log_probs[b, : len(completion.ids)] = torch.tensor(completion.log_probs)
    last = torch.arange(steps) == mask.sum(1, keepdim=True) - 1
    ended = torch.tensor([completion.ended for completion in completions], dtype=torch.bool)[:, None]
    rewards = torch.tensor([row.turn.reward for row in rows], dtype=torch.float32)[:, None] * last
    costs = torch.zeros(batch, signals)
    for b, row in enumerate(rows):
        costs[b] = torch.from_numpy(row.turn.costs)
    values, cost_values = _estimate_values(player, prompts, actions, mask, signals)
    return Trajectories(
        observations=torch.zeros(batch, steps, 0),
        states=None,
        actions=actions,
        log_probs=log_probs,
        action_masks=None,
        values=values,
        bootstrap=torch.zeros(batch, steps),
        cost_values=cost_values,
        cost_bootstrap=torch.zeros(batch, steps, signals),
        rewards=rewards,
        costs=costs[:, None] * last[..., None],
        mask=mask,
        terminated=last & ended,
        truncated=last & ~ended,
        greedy=torch.tensor([row.greedy for row in rows], dtype=torch.bool),
        group=torch.tensor([row.group for row in rows], dtype=torch.int64),
        episode=torch.tensor([row.copy for row in rows], dtype=torch.int64),
        agent=torch.tensor([player.agents.index(row.turn.agent) for row in rows], dtype=torch.int64),
        turn=torch.tensor([row.turn.number for row in rows], dtype=torch.int64),
        prompts=prompts,
    )


@torch.no_grad()
def _estimate_values(
    player: TokenPlayer, prompts: Tensor, responses: Tensor, mask: Tensor, signals: int
) -> tuple[Tensor, Tensor]:
    """Return the values (B, T) and cost values (B, T, K) at the tokens, in reward and cost units.

    The values are zeros without a critic, and of an empty copy, for which the learner estimates them.
    """
    values, cost_values = torch.zeros(mask.shape), torch.zeros(*mask.shape, signals)
    policy = player.policy
    if (policy.value_head is None and policy.cost_head is None) or policy.source is not None:
        return values, cost_values
    device = policy.device
    order = policy.order(prompts, mask).argsort(stable=True)
    for rows in order.split(player.micro_batch):
        part = [x[rows].to(device) for x in (prompts, responses, mask)]
        outputs = policy.evaluate(part[0], part[1], part[2], need_entropy=False)
        if outputs.values is not None:
            values[rows] = player.value_norm.denormalize(outputs.values.float().cpu())
        if outputs.cost_values is not None:
            columns = outputs.cost_values.float().cpu().unbind(-1)
            norms = zip(player.cost_norms, columns, strict=True)
            cost_values[rows] = torch.stack([norm.denormalize(column) for norm, column in norms], -1)
    return values * mask, cost_values * mask[..., None]
