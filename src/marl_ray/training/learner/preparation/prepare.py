"""Prepare a batch for its gradient steps.

The old weights evaluate the batch; then its advantages are estimated, and normalised over all workers.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from marl_ray.algorithms.advantages.normalization import standardize
from marl_ray.algorithms.constraints.penalty import constraint_violation
from marl_ray.algorithms.losses.ratios import truncated_importance
from marl_ray.training.costs import CostStats
from marl_ray.training.learner.forward_passes import fit_critic
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.training.learner.preparation.estimates import Estimates, center_costs, estimate_advantages, split_rows
from marl_ray.training.learner.preparation.normalizers import denormalize, normalize, update_norms
from marl_ray.training.learner.preparation.old_outputs import estimate_divergence, reference_log_probs, take_old_outputs
from marl_ray.training.learner.preparation.statistics import batch_metrics, check_finite, sum_batch
from marl_ray.training.learner.prepared_batch import OldOutputs, PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState
from marl_ray.trajectories import Trajectories


def prepare_batch(
    policy: TrainedPolicy,
    state: UpdateState,
    batch: Trajectories,
    share: BatchShare,
    minibatch_plan: list[list[Selection]],
    costs: CostStats,
    factor: Tensor | None,
    where: str,
    encode: bool = True,
) -> tuple[PreparedBatch, UpdateState, dict[str, float]]:
    """Compute what is constant across the epochs of `minibatch_plan`.

    Returns the prepared batch, the state in which normalisers and multipliers have moved, and the metrics of the batch.

    `factor` (copies, T) multiplies all advantages. Without `encode` the batch gets no inputs for torch's
    networks. Every worker takes part; after the passes over the batch there is one exchange. Raises DivergedError
    naming `where` and a tensor that is not finite, and MarlRayError if the algorithm's advantages have another
    shape than the batch.
    """
    spec = policy.algorithm.spec
    mask, left_out = split_rows(policy, batch)
    inputs = policy.family.encode_inputs(policy.model, batch) if encode else None
    old = take_old_outputs(policy, state, inputs, batch, mask, share, minibatch_plan)
    if policy.must_estimate_values:
        batch = _add_values(policy, state, batch, old)
    reference = reference_log_probs(policy, batch, share, minibatch_plan[0])
    divergence = estimate_divergence(policy, inputs, batch, old.log_probs, reference, share, minibatch_plan[0])
    # From here on `batch` has the rewards that are learned from, and for `critic_first` the values of the fitted critic.
    batch = replace(batch, rewards=_shape_rewards(policy, state, batch, divergence))
    if spec.critic_first:
        batch = replace(batch, values=fit_critic(policy, inputs, batch, mask, share))
    estimates = estimate_advantages(policy, batch)  # here rewards become advantages
    sums = sum_batch(policy, batch, estimates, old, divergence, mask, left_out, share, minibatch_plan)
    check_finite(where, sums)
    moved_state = _move_state(policy, state, estimates, costs, sums)
    advantages = _normalize_advantages(policy, estimates.advantages, mask, sums["advantages"])
    cost_advantages, cost_scale = center_costs(
        estimates.cost_advantages, mask, sums["costs"], spec.constraint == "penalty"
    )
    if factor is not None:  # HAPPO and its relatives: policies updated before this one have changed the joint action
        per_row = factor.to(policy.device).repeat_interleave(share.agents, 0)
        advantages, cost_advantages = advantages * per_row, cost_advantages * per_row[..., None]
    cap = policy.importance_cap
    prepared = PreparedBatch(
        batch=batch,
        share=share,
        minibatch_plan=minibatch_plan,
        mask=mask,
        inputs=inputs,
        order=policy.family.pass_order(policy.model, batch, share.agents),
        advantages=advantages,
        cost_advantages=cost_advantages,
        returns=None if estimates.targets is None else moved_state.value_norm.normalize(estimates.targets),
        cost_returns=normalize(moved_state.cost_norms, estimates.cost_targets) if policy.budgets else None,
        old=old,
        importance=None if cap is None else truncated_importance(old.log_probs, batch.log_probs, cap),
        reference=reference,
        costs=costs,
        violations=_violations(policy, costs, cost_scale),
        sizes=sums["minibatches"],
        sequences=int(sums["batch"][1]),
    )
    return prepared, moved_state, batch_metrics(policy, batch, estimates, sums)


def _shape_rewards(policy: TrainedPolicy, state: UpdateState, batch: Trajectories, divergence: Tensor) -> Tensor:
    """Return the rewards (B, T) that advantages are taken of.

    With `kl_place: reward` the divergence is a part of them.
    """
    hyper = policy.hyper
    penalty = state.kl_coef * divergence if hyper.kl_coef and hyper.kl_place == "reward" else None
    return policy.algorithm.shape_rewards(batch, hyper, policy.settings.horizon, penalty)


def _add_values(policy: TrainedPolicy, state: UpdateState, batch: Trajectories, old: OldOutputs) -> Trajectories:
    """Return the batch with the critics' outputs before the first step, in units of rewards and costs."""
    batch = replace(batch, values=state.value_norm.denormalize(old.values) * batch.mask)
    if not policy.budgets:
        return batch
    return replace(batch, cost_values=denormalize(state.cost_norms, old.cost_values) * batch.mask[..., None])


def _normalize_advantages(policy: TrainedPolicy, raw: Tensor, mask: Tensor, all_moments: Tensor) -> Tensor:
    """Return the advantages (B, T), standardised if `advantage_norm` is `batch`.

    The advantages are standardised over the batch of all workers, and 0 outside of `mask`.
    """
    hyper = policy.hyper
    return standardize(raw, mask, all_moments, hyper.std_ddof) if hyper.advantage_norm == "batch" else raw * mask


def _move_state(
    policy: TrainedPolicy, state: UpdateState, estimates: Estimates, costs: CostStats, sums: dict[str, Tensor]
) -> UpdateState:
    """Move the normalisers by the batch's targets, and the multipliers by its episodes' costs."""
    if estimates.targets is not None:
        (value_norm,) = update_norms([state.value_norm], sums["targets"][None])
        state = replace(state, value_norm=value_norm)
    if policy.budgets:
        state = replace(state, cost_norms=update_norms(state.cost_norms, sums["cost_targets"]))
        if state.multipliers and costs.means is not None and costs.episodes and not policy.algorithm.every_step:
            pairs = zip(state.multipliers, costs.means, strict=True)
            state = replace(state, multipliers=tuple(multiplier.with_cost(cost) for multiplier, cost in pairs))
    return state


def _violations(policy: TrainedPolicy, costs: CostStats, cost_scale: Tensor) -> Tensor:
    """Return the violations (K,) per decision.

    `cost_scale` (K,) are the divisors of the cost advantages.
    """
    raw = raw_violations(policy.budgets, costs)
    if raw is None:
        return torch.zeros(len(policy.budgets), device=policy.device)
    return torch.tensor(raw, device=policy.device) / cost_scale.to(policy.device)


def raw_violations(budgets: Sequence[float], costs: CostStats) -> list[float] | None:
    """Return the excess of a decision over its share of each budget, in units of the cost.

    Return None without budgets or episodes.
    """
    if not budgets or costs.means is None:
        return None
    pairs = zip(costs.means, budgets, strict=True)
    return [constraint_violation(mean, budget, costs.decisions) for mean, budget in pairs]
