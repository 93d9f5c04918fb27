"""Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290, eq. 7): preferences become more likely.

Preferences follow the Bradley-Terry model with beta h as the reward of a response, and nothing is played.

    L = -log sigmoid( beta (h_w - h_l) )        h = log pi(y | x) - log pi_ref(y | x) of a whole response

over pairs of responses to one prompt x, of which y_w was preferred to y_l. pi_ref are the weights that the run began
with. The loss of two equal responses is log 2. With `label_smoothing` e a pair is believed with 1 - e: the loss is (1
- e) L + e L of the pair turned around (Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO",
eq. 3).

Rows come in pairs, the preferred one first. Every decision of both has the pair's loss, so that under the aggregation
`seq-mean-token-mean` the loss of a batch is the mean over its pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from marl_ray.algorithms.advantages.returns import sequence_scores
from marl_ray.algorithms.definition import Algorithm, PolicyLoss, PolicyLossInputs
from marl_ray.config import SPECS, HyperParameters
from marl_ray.errors import MarlRayError
from marl_ray.trajectories import Trajectories


def dpo_loss(preferred: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each pair, (N,), from the log ratios h (N,) of its two responses, in nats."""
    margin = beta * (preferred - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, None]:
    """Return (B, T) the outcome of the response as advantages, which the loss does not read."""
    return sequence_scores(batch.rewards)[:, None] * batch.mask, None


def policy_loss(batch: PolicyLossInputs, hyper: HyperParameters) -> PolicyLoss:
    """Return the pair's loss at every decision of both responses.

    `clipped` marks the pairs whose order the policy has wrong. Raises MarlRayError if the rows are no pairs, or the
    reference policy's log-probabilities are missing.
    """
    if batch.reference_log_probs is None or len(batch.mask) % 2:
        raise MarlRayError("dpo: expected pairs of rows, and log-probabilities of the reference policy")
    ratios = torch.where(batch.mask, batch.log_probs - batch.reference_log_probs, 0.0).sum(1)
    preferred, rejected = ratios.view(-1, 2).unbind(1)
    losses = dpo_loss(preferred, rejected, hyper.beta, hyper.label_smoothing).repeat_interleave(2)
    wrong = (preferred < rejected).repeat_interleave(2)
    return PolicyLoss(losses[:, None].expand_as(batch.log_probs), wrong[:, None].expand_as(batch.mask))


DPO = Algorithm("dpo", SPECS["dpo"], advantages, policy_loss)
