"""ReMax (Li et al. 2023, arXiv 2310.10505, alg. 1): REINFORCE with the greedy episode's return as the baseline.

    A_t = R_t - s(greedy episode of the same start),   R_t = r_t + gamma R_{t+1}       L = -A log pi

One member of every group is played greedily and not trained on. A response to a prompt that the greedy episode never
reached has no baseline, and nothing is learned from it.
"""

from torch import Tensor

from marl_ray.algorithms.advantages.groups import comparable_rows, group_index, subtract_greedy_score
from marl_ray.algorithms.advantages.returns import reward_to_go, sequence_scores
from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.config import SPECS, HyperParameters
from marl_ray.trajectories import Trajectories


def advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, None]:
    """Return (B, T) rewards-to-go less the greedy member's score."""
    index, count = group_index(batch.group, batch.agent, batch.turn, batch.prompts)
    scores = sequence_scores(batch.rewards)
    include = batch.mask.any(1) if batch.prompts is None else comparable_rows(batch, greedy=True)
    baseline = scores - subtract_greedy_score(scores, index, count, include, batch.greedy)
    to_go = reward_to_go(batch.rewards, batch.mask, batch.terminated | batch.truncated, hyper.gamma)
    return (to_go - baseline[:, None]) * (batch.mask & include[:, None]), None


def policy_loss(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the loss -A log pi, whose gradient is the score function; nothing is clipped."""
    return PolicyLoss(-batch.advantages * batch.log_probs, batch.mask.new_zeros(batch.mask.shape))


REMAX = Algorithm("remax", SPECS["remax"], advantages, policy_loss)
