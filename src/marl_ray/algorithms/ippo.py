"""Independent PPO (de Witt et al. 2020, arXiv 2011.09533): every agent is its own PPO learner.

    L = E[ -min(rho A, clip(rho, 1-eps, 1+eps) A) ] + E[ max(h(V - R), h(clip(V) - R)) ] - c E[ H ]

with the critic V on the agent's own observation, A from generalised advantage estimation, h the Huber loss, H the entropy.
Agents that share a policy share its weights and batch.
"""

from torch import Tensor

from marl_ray.algorithms.base import Algorithm
from marl_ray.algorithms.gae import gae
from marl_ray.algorithms.ppo_losses import ppo_losses
from marl_ray.config import AlgorithmConfig
from marl_ray.trajectories import Trajectories


def advantages(batch: Trajectories, hyper: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """GAE on the batch's own values; (B, T) advantages and returns."""
    return gae(
        batch.rewards,
        batch.values,
        batch.bootstrap,
        batch.mask,
        batch.terminated,
        batch.truncated,
        hyper.gamma,
        hyper.gae_lambda,
    )


IPPO = Algorithm("ippo", "arXiv 2011.09533", "local", advantages, ppo_losses)
