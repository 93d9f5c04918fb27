"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300, eqs. 3-4): a group's mean is the baseline.

    A_i = (s_i - mean_G s) / (std_G s + eps)       L = mean_i 1/|o_i| sum_t -min(rho_it A_i, clip(rho_it) A_i)

s_i is the sum of the sequence's rewards, G all sequences of its (start, agent, turn, prompt), itself among them; Bessel's
standard deviation with eps = 1e-6 as in verl (TRL: 1e-4). A group whose members all score the same has advantage 0. The
divergence penalty is `kl_coef` with `kl_place: loss` and k3. `advantage_norm: none` leaves the division out, `batch`
divides by the whole batch's.
"""

from torch import Tensor

from marl_ray.algorithms.advantages.groups import center_scores, group_index, standardize_scores
from marl_ray.algorithms.advantages.returns import sequence_scores
from marl_ray.algorithms.definition import Algorithm
from marl_ray.algorithms.losses.clipped_surrogate import ppo_loss
from marl_ray.config import SPECS, HyperParameters
from marl_ray.trajectories import Trajectories


def group_advantages(batch: Trajectories, hyper: HyperParameters) -> tuple[Tensor, None]:
    """Give every decision of a sequence the sequence's advantage, (B, T)."""
    index, count = group_index(batch.group, batch.agent, batch.turn, batch.prompts)
    scores, include = sequence_scores(batch.rewards), ~batch.greedy & batch.mask.any(1)
    if hyper.advantage_norm == "group":
        relative = standardize_scores(scores, index, count, include, ddof=hyper.std_ddof)
    else:
        relative = center_scores(scores, index, count, include)
    return relative[:, None] * batch.mask, None


GRPO = Algorithm("grpo", SPECS["grpo"], group_advantages, ppo_loss)
