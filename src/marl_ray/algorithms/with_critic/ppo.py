"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347).

    L = E[ -min(rho A, clip(rho, 1-eps, 1+eps') A) ] + E[ max(h(V - R), h(clip(V) - R)) ] - c E[ H ]

with A from generalised advantage estimation (`gae.py`), h the Huber loss, H the entropy, and a critic on the
policy's own observation.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

PPO = Algorithm("ppo", SPECS["ppo"], gae_advantages, ppo_loss)
