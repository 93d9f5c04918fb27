"""REINFORCE++ (Hu 2025, arXiv 2501.03262): PPO's clip on whitened rewards-to-go, without critic and without groups.

    R_t = r_t + gamma R_{t+1}       A = (R - mean_B R) / std_B R

over all decisions of the batch (Bessel, as in verl; OpenRLHF takes the population's). Its divergence penalty is a part
of the reward: `kl_place: reward`.
"""

from torch import Tensor

from marl_ray.algorithms.advantages.returns import reward_to_go
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS, HyperParameters
from marl_ray.trajectories import Trajectories


def advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, None]:
    """Return (B, T) rewards-to-go; the learner whitens them."""
    return reward_to_go(batch.rewards, batch.mask, batch.terminated | batch.truncated, hyper.gamma), None


REINFORCE_PP = Algorithm("reinforce_pp", SPECS["reinforce_pp"], advantages, ppo_loss)
