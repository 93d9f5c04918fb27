"""Generalised advantage estimation (arXiv 1506.02438) on the rewards and on the costs of a batch."""

from torch import Tensor

from marl_ray.algorithms.advantages.gae import gae
from marl_ray.config import HyperParameters
from marl_ray.trajectories import Trajectories


def gae_advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, Tensor]:
    """Return GAE on the batch's own values; (B, T) advantages and returns."""
    ends = (batch.mask, batch.terminated, batch.truncated)
    return gae(batch.rewards, batch.values, batch.bootstrap, *ends, hyper.gamma, hyper.gae_lambda)


def cost_advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, Tensor]:
    """Return GAE on the batch's costs, with their own critic, discount and lambda.

    The results are (B, T, K) advantages and returns. Costs are the team's, so costs that arise after an agent is done,
    while others continue, count for its actions too.
    """
    terminated = batch.terminated if batch.team_terminated is None else batch.team_terminated
    truncated = batch.truncated if batch.team_truncated is None else batch.team_truncated
    ends = (batch.mask, terminated, truncated)
    return gae(batch.costs, batch.cost_values, batch.cost_bootstrap, *ends, hyper.cost_gamma, hyper.cost_gae_lambda)
