"""Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv 2503.14476, eq. 8).

    L = 1/(sum_i |o_i|) sum_i sum_t -min(rho A_i, clip(rho, 1-eps_low, 1+eps_high) A_i),   A of GRPO

Its four parts: a wider clip above (0.28) than below (0.2); groups whose members all score the same are played again
(`dynamic_sampling`; both collectors read `CollectPlan.refills`) and left out if nothing helps; the mean over all
decisions of the batch; and for sequences truncated at the horizon a filter (`overlong_filter`) or a soft penalty
(`overlong_buffer`, eq. 13). No divergence penalty. Not to be confused with `direct_dapo`.
"""

from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.algorithms.without_critic.grpo import group_advantages
from marl_ray.config import SPECS

DAPO = Algorithm("dapo", SPECS["dapo"], group_advantages, ppo_loss)
