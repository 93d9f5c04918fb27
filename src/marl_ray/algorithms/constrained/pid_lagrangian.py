"""PID-Lagrangian (Stooke, Achiam and Abbeel 2020, arXiv 2007.03964): PPO-Lagrangian whose multiplier a controller sets.

The multiplier is lambda = max(0, kp P + I + kd D), see `multipliers.PID`. The proportional part damps the oscillation
of the integral alone; the derivative part acts only on rising costs. P and J are not smoothed. The authors' code
smooths both over about twenty batches (0.95), and an error that arrives so late damps nothing.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.constraints.multipliers import PID
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS

PID_LAGRANGIAN = Algorithm(
    "pid_lagrangian", SPECS["pid_lagrangian"], gae_advantages, ppo_loss, multiplier=PID.from_hyper
)
