"""Heterogeneous-agent PPO (Kuba et al. 2022, arXiv 2109.11251, eq. 11): policies are updated one after another.

    L_i = E[ -min(rho_i M A, clip(rho_i, 1-eps, 1+eps) M A) ],   M = product over the policies before i of pi_new / pi_old

in an order drawn anew for every batch. M is the ratio by which the policies that were already updated have changed the
joint action's probability. `update_team` keeps it, and the learner multiplies the advantages by it (M > 0, so this
equals the formula).
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

HAPPO = Algorithm("happo", SPECS["happo"], gae_advantages, ppo_loss)
