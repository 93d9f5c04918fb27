"""Algorithms with a mistake each, as `toys.broken_algorithms:NAME`."""

from dataclasses import replace

from torch import Tensor

from marl_ray.algorithms import PolicyLoss, PolicyLossInputs, ValueLossInputs, algorithm_of
from marl_ray.algorithms.losses.critics import clipped_value_loss
from marl_ray.config import HyperParameters
from marl_ray.trajectories import Trajectories


def _hopeful(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, Tensor | None]:
    """Takes half a reward for granted where an episode is truncated."""
    raw, targets = algorithm_of("rloo").advantages(batch, hyper)
    return raw + 0.5 * batch.truncated.any(1, keepdim=True) * batch.mask, targets


def _by_length(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Counts a sequence once more for each of its decisions."""
    result = algorithm_of("dr_grpo").policy_loss(batch, hyper)
    return PolicyLoss(result.loss * batch.mask.sum(1, keepdim=True), result.clipped)


def _clipped_around_zero(batch: ValueLossInputs, hyper: HyperParameters) -> Tensor:
    return clipped_value_loss(batch.outputs, 0 * batch.old, batch.targets, hyper.value_clip, hyper.huber_delta)


def _backwards(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    return algorithm_of("ppo").policy_loss(batch._replace(advantages=-batch.advantages), hyper)


def _of_rewards_alone(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, Tensor | None]:
    """Every decision gets its own reward and nothing of what it leads to."""
    return batch.rewards - batch.values, batch.rewards


def _raises(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    raise TypeError("unsupported operand")


HOPEFUL = replace(algorithm_of("rloo"), name="hopeful", advantages=_hopeful)
BY_LENGTH = replace(algorithm_of("dr_grpo"), name="by_length", policy_loss=_by_length)
CLIPPED_AROUND_ZERO = replace(algorithm_of("ppo"), name="clipped_around_zero", value_loss=_clipped_around_zero)
BACKWARDS = replace(algorithm_of("ppo_lagrangian"), name="backwards", policy_loss=_backwards)
SHORT_SIGHTED = replace(algorithm_of("mappo"), name="short_sighted", advantages=_of_rewards_alone)
RAISES = replace(algorithm_of("reinforce_pp"), name="raises", policy_loss=_raises)
