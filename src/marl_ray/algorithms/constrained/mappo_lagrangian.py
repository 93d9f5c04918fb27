"""MAPPO-Lagrangian (Gu et al. 2021, arXiv 2110.02793, alg. 2): HAPPO's sequential update on a combined advantage.

    A' = A - sum_k lambda_k C_k       lambda_k <- max(0, lambda_k + lr (J_k + L E[rho C_k] - d_k) / d_k) after every step

Every policy has multipliers of its own. L E[rho C_k] estimates how far this update has moved the cost of an episode of
L decisions; the authors' code mixes a per-decision mean with a per-episode cost. Unlike theirs, the multipliers are
damped by default (`multiplier_damping`, see `multipliers.Lagrange`).
"""

from functools import partial

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.constraints.multipliers import Lagrange
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

MAPPO_LAGRANGIAN = Algorithm(
    "mappo_lagrangian",
    SPECS["mappo_lagrangian"],
    gae_advantages,
    ppo_loss,
    multiplier=partial(Lagrange.from_hyper, optimizer="sgd"),
    rescale=False,
    every_step=True,
)
