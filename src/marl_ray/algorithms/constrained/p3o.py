"""Penalised PPO, P3O (Zhang et al. 2022, arXiv 2205.11814): PPO's loss plus an exact penalty for costs above the budget.

    L = E[ -min(rho A, clip(rho) A) ] + kappa sum_k max(0, E[ max(rho C_k, clip(rho) C_k) ] + c_k)

c_k = (J_k - d_k) / L is the violation per decision, see `penalty.py`; C_k is centred, and C_k and c_k are divided by
the same standard deviation, so that `penalty` (kappa) means the same for every price. The hinge is around the mean of
the whole minibatch over all workers; with large minibatches it seldom switches from step to step.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

P3O = Algorithm("p3o", SPECS["p3o"], gae_advantages, ppo_loss)
