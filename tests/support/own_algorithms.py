"""An algorithm as a user writes it, with a hyper-parameter of its own."""

from dataclasses import replace

from pydantic import PositiveFloat

from marl_ray.algorithms import Algorithm, PolicyLoss, PolicyLossInputs, algorithm_of
from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.algorithms.losses.ratios import truncated_importance
from marl_ray.config import SPECS, AlgorithmSpec, HyperParameters


class DecoupledHyper(HyperParameters):
    """PPO's keys and one more."""

    behaviour_cap: PositiveFloat = 2.0
    """Bound of the weight pi_old / pi_behaviour."""


def policy_loss(batch: PolicyLossInputs, hyper: DecoupledHyper) -> PolicyLoss:
    """PPO's clip around the policy that the update began with, weighted towards it from the one that sampled."""
    weight = truncated_importance(batch.old_log_probs, batch.behaviour_log_probs, hyper.behaviour_cap)
    loss, clipped = ppo_loss(batch, hyper)
    return PolicyLoss(weight * loss, clipped)


DECOUPLED_PPO = Algorithm(
    "decoupled_ppo",
    AlgorithmSpec(
        "Decoupled PPO",
        "arXiv 2110.00641",
        "local",
        recompute=True,
        keys=(*SPECS["ppo"].keys, "behaviour_cap"),
        hyper=DecoupledHyper,
    ),
    gae_advantages,
    policy_loss,
)
_LAGRANGIAN = algorithm_of("ppo_lagrangian")
FITTED_LAGRANGIAN = replace(
    _LAGRANGIAN,
    name="fitted_lagrangian",
    spec=replace(_LAGRANGIAN.spec, critic_first=True, keys=(*_LAGRANGIAN.spec.keys, "critic_epochs")),
    critic_targets=algorithm_of("direct_dapo").critic_targets,
)
"""PPO-Lagrangian whose critic of the reward is fitted before the advantages; its cost critics learn by gradient steps."""
