"""Algorithms: pure functions on tensors. One named algorithm per file; shared maths beside."""

from marl_ray.algorithms.base import Algorithm, Evaluated, PolicyLoss
from marl_ray.algorithms.cispo import CISPO
from marl_ray.algorithms.cpo import CPO
from marl_ray.algorithms.dapo import DAPO
from marl_ray.algorithms.direct_dapo import DIRECT_DAPO
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

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        *(PPO, IPPO, MAPPO, HAPPO),
        *(GRPO, DR_GRPO, RLOO, REINFORCE_PP, REINFORCE_PP_BASELINE, REMAX, GSPO, CISPO, DAPO, DIRECT_DAPO),
        *(PPO_LAGRANGIAN, PID_LAGRANGIAN, P3O, CPO, MAPPO_LAGRANGIAN, MAP3O, MACPO),
    )
}

__all__ = ["ALGORITHMS", "Algorithm", "Evaluated", "PolicyLoss"]
