"""Algorithms: pure functions on tensors, a file for each named algorithm, and folders of shared mathematics."""

from marl_ray.algorithms.base import Algorithm, Evaluated, PolicyLoss
from marl_ray.algorithms.constrained.cpo import CPO
from marl_ray.algorithms.constrained.macpo import MACPO
from marl_ray.algorithms.constrained.map3o import MAP3O
from marl_ray.algorithms.constrained.mappo_lagrangian import MAPPO_LAGRANGIAN
from marl_ray.algorithms.constrained.p3o import P3O
from marl_ray.algorithms.constrained.pid_lagrangian import PID_LAGRANGIAN
from marl_ray.algorithms.constrained.ppo_lagrangian import PPO_LAGRANGIAN
from marl_ray.algorithms.from_preferences.dpo import DPO
from marl_ray.algorithms.losses.value_losses import Valued
from marl_ray.algorithms.with_critic.direct_dapo import DIRECT_DAPO
from marl_ray.algorithms.with_critic.happo import HAPPO
from marl_ray.algorithms.with_critic.ippo import IPPO
from marl_ray.algorithms.with_critic.mappo import MAPPO
from marl_ray.algorithms.with_critic.ppo import PPO
from marl_ray.algorithms.without_critic.cispo import CISPO
from marl_ray.algorithms.without_critic.dapo import DAPO
from marl_ray.algorithms.without_critic.dr_grpo import DR_GRPO
from marl_ray.algorithms.without_critic.grpo import GRPO
from marl_ray.algorithms.without_critic.gspo import GSPO
from marl_ray.algorithms.without_critic.reinforce_pp import REINFORCE_PP
from marl_ray.algorithms.without_critic.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from marl_ray.algorithms.without_critic.remax import REMAX
from marl_ray.algorithms.without_critic.rloo import RLOO
from marl_ray.config import spec_of
from marl_ray.errors import MarlRayError
from marl_ray.imports import imported

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        *(PPO, IPPO, MAPPO, HAPPO),
        *(GRPO, DR_GRPO, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE, REMAX, GSPO, CISPO, DAPO, DIRECT_DAPO),
        DPO,
        *(PPO_LAGRANGIAN, PID_LAGRANGIAN, P3O, CPO, MAPPO_LAGRANGIAN, MAP3O, MACPO),
    )
}


def algorithm_of(reference: str) -> Algorithm:
    """Return a built-in algorithm by its name, or a user's by `package.module:NAME`; raises MarlRayError if there is
    none."""
    spec_of(reference)
    algorithm = ALGORITHMS.get(reference) or imported(reference)
    if not isinstance(algorithm, Algorithm):
        raise MarlRayError(f"{reference}: expected an Algorithm of marl_ray.algorithms, got {type(algorithm).__name__}")
    return algorithm


__all__ = ["ALGORITHMS", "Algorithm", "Evaluated", "PolicyLoss", "Valued", "algorithm_of"]
