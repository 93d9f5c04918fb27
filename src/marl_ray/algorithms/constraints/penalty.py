"""The exact penalty of P3O (Zhang et al. 2022, arXiv 2205.11814).

    L = L_R + kappa sum_k max(0, L_C_k + c_k)        L_C_k = E[ max(r C_k, clip(r, 1-eps, 1+eps) C_k) ]

The hinge is around a mean over the whole minibatch. So a pass without gradients computes the means first. Then every
micro-batch adds weight_k * (its part of L_C_k) to its loss, with the weights below, and the gradients add up to the
gradient of L.
"""

import math

from torch import Tensor

from marl_ray.errors import MarlRayError


def constraint_violation(mean_cost: float, budget: float, decisions_per_episode: float) -> float:
    """Return c = (J_c - d) / L, the excess over the budget per decision; negative within the budget.

    `mean_cost` J_c and `budget` d are per episode, undiscounted. The surrogate E[r C] is a mean over decisions, and an
    episode's cost changes by about L times as much, so dividing by L puts both in one inequality: c + E[r C] <= 0. L
    counts all decisions of an episode that the surrogate averages over. For example, three agents on one policy that
    each make 50 decisions and have the team's cost make L = 150. If C is divided by a scale (its standard deviation),
    divide the result by the same one. Raises MarlRayError if L is not a number above 0.
    """
    if not (math.isfinite(decisions_per_episode) and decisions_per_episode > 0):
        raise MarlRayError(f"decisions per episode: expected a number above 0, got {decisions_per_episode}")
    return (mean_cost - budget) / decisions_per_episode


def pessimistic_cost_surrogate(ratio: Tensor, cost_advantages: Tensor, clip: float) -> Tensor:
    """Return max(r C, clip(r, 1-clip, 1+clip) C), element by element.

    A cost is to be lowered, so this is the larger of the two, where PPO takes the smaller one for a reward. `ratio` is
    pi_new / pi_old of the action taken; shapes broadcast, so (N, 1) with costs (N, K) gives (N, K).
    """
    return (ratio * cost_advantages).maximum(ratio.clamp(1 - clip, 1 + clip) * cost_advantages)


def exact_penalty_weights(surrogates: Tensor, violations: Tensor, kappa: float) -> Tensor:
    """Return kappa where surrogate_k + c_k > 0, else 0, (K,): the weights of the cost surrogates.

    These weights are the derivative of the exact penalty kappa sum_k max(0, surrogate_k + c_k) by each surrogate mean.
    Both inputs are (K,), per decision; the surrogates are means over the whole minibatch.
    """
    return kappa * (surrogates.detach() + violations > 0).to(surrogates.dtype)
