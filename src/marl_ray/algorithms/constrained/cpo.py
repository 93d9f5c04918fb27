"""Constrained policy optimisation (Achiam et al. 2017, arXiv 1705.10528): a trust-region step within the budget.

    min_x g.x   subject to   b_k.x + c_k <= 0,   x'Hx / 2 <= delta

g is the gradient of -E[rho A], b_k that of E[rho C_k], H the Fisher matrix, c_k the violation per decision; solved in
`trust_region.py`, followed by a line search that restores the old weights exactly if no step holds. C_k is centred and keeps
its units.
"""

from marl_ray.algorithms.advantages.batch_gae import gae_advantages
from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.config import SPECS, HyperParameters


def surrogate(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the loss -rho A; the trust region takes the place of the clip."""
    ratio = token_ratio(batch.log_probs, batch.old_log_probs)
    return PolicyLoss(-ratio * batch.advantages, batch.mask.new_zeros(batch.mask.shape))


CPO = Algorithm("cpo", SPECS["cpo"], gae_advantages, surrogate)
