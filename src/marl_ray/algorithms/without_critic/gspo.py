"""Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071, eqs. 5-7, 13 and 14).

All decisions of a sequence share one ratio, the geometric mean of theirs:

    s_i = exp( mean_t (log pi - log pi_old) )       L = mean_i mean_t -min(s_it A_i, clip(s_it, 1-eps, 1+eps') A_i)

s_it has the value of s_i and the gradient of the decision's own log-probability, so that advantages may differ within a
sequence. A is GRPO's. The clip is narrow (3e-4, 4e-4) because a mean of log ratios hardly moves.
"""

from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.algorithms.losses.clipped_surrogate import clipped_surrogate
from marl_ray.algorithms.losses.ratios import gspo_token_log_ratio
from marl_ray.algorithms.without_critic.grpo import group_advantages
from marl_ray.config import SPECS, HyperParameters


def policy_loss(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the clipped surrogate with the sequence's ratio at every decision."""
    ratio = gspo_token_log_ratio(batch.log_probs, batch.old_log_probs, batch.mask).exp()
    return clipped_surrogate(ratio, batch.advantages, *hyper.clip_range, hyper.dual_clip)


GSPO = Algorithm("gspo", SPECS["gspo"], group_advantages, policy_loss)
