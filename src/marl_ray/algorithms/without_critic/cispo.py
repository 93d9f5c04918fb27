"""Clipped importance sampling policy optimisation (MiniMax-M1, arXiv 2506.13585, eqs. 4-5).

    L = -sg( clip(rho, 1-eps, 1+eps') ) A log pi

The clip bounds the weight of a decision and never takes its gradient away. A is GRPO's. As in the paper, only the
upper bound holds by default (eps = 1). The paper tunes eps' and does not report its value; here it is 4, a weight of
at most 5.
"""

from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.algorithms.without_critic.grpo import group_advantages
from marl_ray.config import SPECS, HyperParameters


def policy_loss(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the weighted log-probability, whose gradient is the score function.

    `clipped` marks bounded weights.
    """
    ratio = token_ratio(batch.log_probs, batch.old_log_probs).detach()
    weight = ratio.clamp(*hyper.clip_range)
    return PolicyLoss(-weight * batch.advantages * batch.log_probs, weight != ratio)


CISPO = Algorithm("cispo", SPECS["cispo"], group_advantages, policy_loss)
