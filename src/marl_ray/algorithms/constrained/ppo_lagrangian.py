"""PPO-Lagrangian (Ray, Achiam and Amodei 2019, "Benchmarking Safe Exploration in Deep Reinforcement Learning").

    A' = (A - sum_k lambda_k C_k) / (1 + sum_k lambda_k)       lambda_k <- clip(lambda_k + Adam step on (J_k - d_k) / d_k)

The loss is PPO's on A'. C are the cost advantages, from critics of their own, centred and not divided by their standard
deviation. The multipliers move first, by the cost of this batch's episodes, and then the policy. Adam moves a multiplier
by about `multiplier_lr`, whatever the size of the violation. The division keeps the size of the policy's step as
multipliers grow.

By default two things differ from the paper. A multiplier is damped: the weight of C is lambda + `multiplier_damping`
(J - d) / d, see `multipliers.Lagrange`. And `multiplier_lr` is a tenth of the paper's 0.05. With `multiplier_damping` 0
both are the paper's.
"""

from functools import partial

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.constraints.multipliers import Lagrange
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

PPO_LAGRANGIAN = Algorithm(
    "ppo_lagrangian",
    SPECS["ppo_lagrangian"],
    gae_advantages,
    ppo_loss,
    multiplier=partial(Lagrange.from_hyper, optimizer="adam"),
)
