"""Algorithms: pure functions on tensors. One named algorithm per file; shared maths beside."""

from marl_ray.algorithms.base import Algorithm, Evaluated, PolicyLoss
from marl_ray.algorithms.cispo import CISPO
from marl_ray.algorithms.cpo import CPO
from marl_ray.algorithms.dapo import DAPO
from marl_ray.algorithms.direct_dapo import DIRECT_DAPO
from marl_ray.algorithms.dpo import DPO
from marl_ray.algorithms.dr_grpo import DR_GRPO
from marl_ray.algorithms.grpo import GRPO
from marl_ray.algorithms.gspo import GSPO
from marl_ray.algorithms.happo import HAPPO
from marl_ray.algorithms.ippo import IPPO
from marl_ray.algorithms.macpo import MACPO
from marl_ray.algorithms.map3o import MAP3O
from marl_ray.algorithms.mappo import MAPPO
from marl_ray.algorithms.mappo_lagrangian import MAPPO_LAGRANGIAN
from marl_ray.algorithms.p3o import P3O
from marl_ray.algorithms.pid_lagrangian import PID_LAGRANGIAN
from marl_ray.algorithms.ppo import PPO
from marl_ray.algorithms.ppo_lagrangian import PPO_LAGRANGIAN
from marl_ray.algorithms.reinforce_pp import REINFORCE_PP
from marl_ray.algorithms.reinforce_pp_baseline import REINFORCE_PP_BASELINE
from marl_ray.algorithms.remax import REMAX
from marl_ray.algorithms.rloo import RLOO
from marl_ray.algorithms.value_losses import Valued
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
    """A built-in algorithm by its name, or an own one by `package.module:NAME`; raises MarlRayError."""
    spec_of(reference)
    found = ALGORITHMS.get(reference) or imported(reference)
    if not isinstance(found, Algorithm):
        raise MarlRayError(f"{reference}: expected an Algorithm of marl_ray.algorithms, got {type(found).__name__}")
    return found


__all__ = ["ALGORITHMS", "Algorithm", "Evaluated", "PolicyLoss", "Valued", "algorithm_of"]
