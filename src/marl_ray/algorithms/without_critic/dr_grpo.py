"""GRPO done right (Liu et al. 2025, arXiv 2503.20783, sec. 3): GRPO without its two biases.

    A_i = s_i - mean_G s       L = 1/N sum_i 1/L_max sum_t -min(rho_it A_i, clip(rho_it) A_i)

No division by the group's standard deviation (which favours easy and hard starts), and one constant in place of each
sequence's own length (which favours long wrong answers): the most decisions that a sequence may have.
"""

from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.algorithms.without_critic.grpo import group_advantages
from marl_ray.config import SPECS

DR_GRPO = Algorithm("dr_grpo", SPECS["dr_grpo"], group_advantages, ppo_loss)
