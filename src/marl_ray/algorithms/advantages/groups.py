"""Baselines from groups, without a critic. The sequences of a group share a start, an agent and a prompt.

Every function takes `scores` (B,), `index` (B,) int64 with values below `count` (both from `group_index`) and `include`
(B,) bool. Rows with include False (greedy rows, dropped rows) and rows whose score is NaN (without a reward) count in
no statistic and get 0. A group whose scores are all equal gets exactly 0, whatever rounding does to its mean. A group
must be whole on one worker. Statistics are float64, results have the dtype of `scores`; nothing carries a gradient.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from marl_ray.errors import MarlRayError
from marl_ray.trajectories import Trajectories

Singleton = Literal["zero", "score"]
"""The advantage in a group of one: 0, so that nothing is learned (TRL, SkyRL), or the raw score (verl's loop version)."""


class GroupMoments(NamedTuple):
    """Statistics of the included scores of each group, (count,) float64."""

    size: Tensor
    mean: Tensor
    """0 for an empty group."""
    squares: Tensor
    """Sum of squared deviations from the mean; exactly 0 where all scores are equal."""


def group_index(group: Tensor, agent: Tensor, turn: Tensor, prompts: Tensor | None = None) -> tuple[Tensor, int]:
    """Give each distinct (group, agent, turn, prompt) a number.

    `group`, `agent` and `turn` are (B,) int64, `prompts` (B, P) int64. Agents and turns are kept apart because their
    rewards differ, and prompts because two answers can be compared only if they answer the same prompt (AT-GRPO, arXiv
    2510.11062; Dr. MAS). Returns each row's number, (B,) int64, and the count of numbers.
    """
    keys = [group, agent, turn]
    if prompts is not None:
        keys.append(torch.unique(prompts, dim=0, return_inverse=True)[1])
    distinct, index = torch.unique(torch.stack(keys, 1), dim=0, return_inverse=True)
    return index, len(distinct)


def comparable_rows(batch: Trajectories, greedy: bool) -> Tensor:
    """Return (B,) bool: True for sequences with decisions that can be compared with another one of their group.

    With `greedy` the other one is a greedy sequence, otherwise another sampled one.
    """
    index, count = group_index(batch.group, batch.agent, batch.turn, batch.prompts)
    sampled = ~batch.greedy & batch.mask.any(1)
    others = batch.greedy if greedy else sampled
    size = index.new_zeros(count).index_add(0, index, others.long())
    return sampled & (size >= (1 if greedy else 2))[index]


def group_moments(scores: Tensor, index: Tensor, count: int, include: Tensor) -> GroupMoments:
    """Compute size, mean and squared deviations of every group.

    The module's docstring explains the arguments.
    """
    include = _rows_with_scores(scores, include)
    exact = torch.where(include, scores.detach().double(), 0.0)
    zeros = exact.new_zeros(count)
    size = zeros.index_add(0, index, include.double())
    mean = zeros.index_add(0, index, exact) / size.clamp(min=1)
    low, high = (
        zeros.scatter_reduce(0, index[include], exact[include], reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    # The mean of equal numbers need not be that number: three times 0.1 is not 0.3.
    mean = torch.where(low == high, low, mean)
    squares = zeros.index_add(0, index, torch.where(include, exact - mean[index], 0.0) ** 2)
    return GroupMoments(size, mean, squares)


def center_scores(
    scores: Tensor, index: Tensor, count: int, include: Tensor, *, singleton: Singleton = "zero"
) -> Tensor:
    """Return s - mean of the group, (B,): Dr. GRPO (arXiv 2503.20783), REINFORCE++ with a baseline."""
    moments = group_moments(scores, index, count, include)
    return _finish_advantages(scores.double() - moments.mean[index], scores, index, include, moments, singleton)


def standardize_scores(
    scores: Tensor,
    index: Tensor,
    count: int,
    include: Tensor,
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    singleton: Singleton = "zero",
) -> Tensor:
    """Return (s - mean) / (std + eps) within the group, (B,).

    This is GRPO (arXiv 2402.03300, section 4.1.2). std = sqrt(sum of squared deviations / (size - ddof)): ddof 1 as
    verl (eps 1e-6) and TRL (eps 1e-4), 0 for the population's. verl divides the raw score of a group of one by 1 + eps;
    here "score" means the score itself.
    """
    moments = group_moments(scores, index, count, include)
    std = (moments.squares / (moments.size - ddof).clamp(min=1)).sqrt()
    scale = torch.where(moments.squares > 0, std + eps, 1.0)
    result = (scores.double() - moments.mean[index]) / scale[index]
    return _finish_advantages(result, scores, index, include, moments, singleton)


def leave_one_out(
    scores: Tensor, index: Tensor, count: int, include: Tensor, *, singleton: Singleton = "zero"
) -> Tensor:
    """Return s - mean of the others in the group, (B,), as (s - mean) n / (n - 1).

    This is RLOO (arXiv 2402.14740, eq. 8).
    """
    moments = group_moments(scores, index, count, include)
    factor = moments.size / (moments.size - 1).clamp(min=1)
    result = (scores.double() - moments.mean[index]) * factor[index]
    return _finish_advantages(result, scores, index, include, moments, singleton)


def subtract_greedy_score(scores: Tensor, index: Tensor, count: int, include: Tensor, greedy: Tensor) -> Tensor:
    """Return s - score of the group's greedy row, (B,).

    This is ReMax (arXiv 2310.10505, algorithm 1). Greedy rows get 0. `greedy` (B,) bool. Several greedy rows of a group
    are averaged. Where the greedy row has no score (NaN) there is no baseline, so the group gets 0. Raises MarlRayError
    if a group with included rows has no greedy row at all.
    """
    rows = _rows_with_scores(scores, include) & ~greedy
    present = torch.zeros(count, dtype=torch.bool, device=scores.device)
    present[index[greedy]] = True
    missing = rows & ~present[index]
    if bool(missing.any()):
        raise MarlRayError(
            f"greedy: {len(index[missing].unique())} of {count} groups have no greedy row; expected one in every group"
        )
    baseline = group_moments(scores, index, count, greedy)
    rows = rows & (baseline.size > 0)[index]
    return torch.where(rows, scores.detach().double() - baseline.mean[index], 0.0).to(scores.dtype)


def _rows_with_scores(scores: Tensor, include: Tensor) -> Tensor:
    return include & ~scores.isnan()


def _finish_advantages(
    result: Tensor, scores: Tensor, index: Tensor, include: Tensor, moments: GroupMoments, singleton: Singleton
) -> Tensor:
    """Return the advantages, with `singleton`'s in groups of one, and 0 for rows that do not count."""
    if singleton not in ("zero", "score"):
        raise MarlRayError(f"singleton: expected 'zero' or 'score', got {singleton!r}")
    if singleton == "score":
        result = torch.where((moments.size == 1)[index], scores.double(), result)
    return torch.where(_rows_with_scores(scores, include), result, 0.0).detach().to(scores.dtype)
