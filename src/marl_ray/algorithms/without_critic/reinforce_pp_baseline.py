"""REINFORCE++ with a group baseline (Hu 2025, arXiv 2501.03262, sec. 3.2).

    A_i = s_i - mean_G s, then whitened over all decisions of the batch

The group gives the baseline and the batch the scale, so that a group whose scores hardly differ does not get large
advantages.
"""

from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.algorithms.without_critic.grpo import group_advantages
from marl_ray.config import SPECS

REINFORCE_PP_BASELINE = Algorithm("reinforce_pp_baseline", SPECS["reinforce_pp_baseline"], group_advantages, ppo_loss)
