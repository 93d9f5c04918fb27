"""Multi-agent P3O (Zhang et al. 2022, arXiv 2205.11814, sec. 5): each policy minimises P3O's loss on central critics.

Actors stay decentralised, and all are updated at once. Every policy's loss (`p3o.py`) has the penalty of the team's
violation.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

MAP3O = Algorithm("map3o", SPECS["map3o"], gae_advantages, ppo_loss)
