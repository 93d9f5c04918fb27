"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, eq. 8).

    A_i = s_i - mean of the other members' s

The same name has two objectives in the field: `ratio_level: token` is verl's (PPO's clip, one ratio per decision),
`sequence` is TRL's (one ratio per sequence, the product of all its decisions' ratios, not normalised by length; a
sequence is one term of the loss, so `aggregation` must be `seq-mean-token-mean`, under which equal terms of its
decisions are that one).
"""

from torch import Tensor

from marl_ray.algorithms.advantages.groups import group_index, leave_one_out
from marl_ray.algorithms.advantages.returns import sequence_scores
from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.algorithms.losses.clipped_surrogate import clipped_surrogate, ppo_loss
from marl_ray.algorithms.losses.ratios import LOG_RATIO_LIMIT, sequence_log_ratio
from marl_ray.config import SPECS, HyperParameters
from marl_ray.trajectories import Trajectories


def advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, None]:
    """Give every decision of a sequence the sequence's advantage, (B, T)."""
    index, count = group_index(batch.group, batch.agent, batch.turn, batch.prompts)
    include = ~batch.greedy & batch.mask.any(1)
    relative = leave_one_out(sequence_scores(batch.rewards), index, count, include)
    return relative[:, None] * batch.mask, None


def policy_loss(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the loss with one ratio per decision, or with one per sequence that its decisions share."""
    if hyper.ratio_level == "token":
        return ppo_loss(batch, hyper)
    log_ratio = sequence_log_ratio(batch.log_probs, batch.old_log_probs, batch.mask, summed=True)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[:, None].expand_as(batch.advantages)
    return clipped_surrogate(ratio, batch.advantages, *hyper.clip_range, hyper.dual_clip)


RLOO = Algorithm("rloo", SPECS["rloo"], advantages, policy_loss)
