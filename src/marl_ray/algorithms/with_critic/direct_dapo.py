"""Direct advantage policy optimisation (Liu et al. 2024, arXiv 2412.18279), step by step, critic first.

    critic   min_V  -[ G log V + (1 - G) log(1 - V) ]          G: return-to-go, scaled to [0, 1] (a soft target; sec. 3.2)
    actor    min_pi 1/2 ( A / beta - log(pi / pi_old) )^2       (eq. 9; log pi of a step is the sum over its tokens;
                                                                beta: `hyper.regression_beta`)

The critic is fitted first and then held. The paper subtracts from V(s.a_i) the mean over candidate steps of the same s
(eq. 13); where a state has one sampled action, that mean's expectation is V(s) itself, so A = r + V(s') - V(s) here.
Nothing is discounted, and the value after the end of a sequence is 0, also where a limit on its length truncated it. The
critic is fitted to such returns, so an advantage must not contain more. Not to be confused with `dapo`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from marl_ray.algorithms.advantages.gae import gae
from marl_ray.algorithms.advantages.returns import reward_to_go
from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.algorithms.losses.critics import ValueLossInputs
from marl_ray.config import SPECS, HyperParameters
from marl_ray.trajectories import Trajectories


def targets(batch: Trajectories, hyper: HyperParameters) -> Tensor:
    """Return (B, T) soft targets of the critic in [0, 1]."""
    to_go = reward_to_go(batch.rewards, batch.mask, batch.terminated | batch.truncated, gamma=1.0)
    return ((to_go - hyper.lowest_return) / (hyper.highest_return - hyper.lowest_return)).clamp(0, 1)


def value_loss(batch: ValueLossInputs, hyper: HyperParameters) -> Tensor:
    """Return the binary cross-entropy of logits against soft targets, per decision."""
    return functional.binary_cross_entropy_with_logits(batch.outputs, batch.targets, reduction="none")


def advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, None]:
    """Return r + V(s') - V(s), (B, T), where `values` are the fitted critic's logits.

    V(s') is 0 behind the end of a sequence.
    """
    low, width = hyper.lowest_return, hyper.highest_return - hyper.lowest_return
    values = low + width * torch.sigmoid(batch.values)
    ended = batch.terminated | batch.truncated
    zeros = torch.zeros_like(values)
    return gae(batch.rewards, values, zeros, batch.mask, ended, torch.zeros_like(ended), 1.0, 0.0)[0], None


def policy_loss(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the squared regression of the log ratio on A / beta, times beta.

    The factor leaves the minimum where it is and makes the first gradient the policy gradient's, -A grad log pi, whatever
    beta is; without it the learning rate would have to follow beta.
    """
    log_ratio = batch.log_probs - batch.old_log_probs
    error = batch.advantages / hyper.regression_beta - log_ratio
    return PolicyLoss(0.5 * hyper.regression_beta * error.square(), batch.mask.new_zeros(batch.mask.shape))


DIRECT_DAPO = Algorithm(
    "direct_dapo", SPECS["direct_dapo"], advantages, policy_loss, value_loss, critic_targets=targets
)
