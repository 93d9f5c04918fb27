"""PID-Lagrangian (Stooke, Achiam and Abbeel 2020, arXiv 2007.03964): the multiplier is a controller's output.

PPO-Lagrangian with lambda = max(0, kp P + I + kd D), see `multipliers.PID`. The proportional part damps the oscillation
of the integral alone, the derivative part acts only on rising costs. P and J are not smoothed. The authors' code
smooths both over about twenty batches (0.95), but so late an error damps nothing.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.base import Algorithm
from marl_ray.algorithms.constraints.multipliers import PID
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS, HyperParameters


def multiplier(hyper: HyperParameters, budget: float) -> PID:
    """Return a constraint's multiplier before the first batch; `budget` is the mean cost that an episode may have."""
    return PID(
        budget,
        kp=hyper.pid_kp,
        ki=hyper.pid_ki,
        kd=hyper.pid_kd,
        delay=hyper.pid_delay,
        error_decay=0.0,
        cost_decay=0.0,
        integral=hyper.multiplier_init,
    )


PID_LAGRANGIAN = Algorithm("pid_lagrangian", SPECS["pid_lagrangian"], gae_advantages, ppo_loss, multiplier=multiplier)
