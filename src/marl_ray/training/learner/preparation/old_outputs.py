"""The outputs before the first gradient step: of the policy itself, and of the reference policy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marl_ray.algorithms.losses.kl import kl_estimate
from marl_ray.training.learner.forward_passes import score_all, score_in_passes
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.training.learner.preparation.normalizers import normalize
from marl_ray.training.learner.prepared_batch import OldOutputs
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState
from marl_ray.trajectories import Trajectories


def take_old_outputs(
    policy: TrainedPolicy,
    state: UpdateState,
    inputs: object,
    batch: Trajectories,
    mask: Tensor,
    share: BatchShare,
    minibatch_plan: list[list[Selection]],
) -> OldOutputs:
    """Take the outputs that the rollout recorded, or evaluate the batch again where `policy.must_recompute`.

    `state` holds the normalisers with which the batch was gathered. The critics' outputs are in units of these.
    """
    hyper = policy.hyper
    values = state.value_norm.normalize(batch.values)
    cost_values = normalize(state.cost_norms, batch.cost_values) if policy.budgets else batch.cost_values
    # A single gradient step starts at the old weights and computes their outputs itself; only these need them before it.
    needed = policy.importance_cap is not None or policy.settings.has_other_engine or hyper.kl_coef
    if not policy.must_recompute or not (sum(map(len, minibatch_plan)) > 1 or needed):
        return OldOutputs(batch.log_probs, values, cost_values)
    needs_all = hyper.kl_coef or policy.must_estimate_values
    outputs = score_all(policy, inputs, batch, batch.mask if needs_all else mask, share, minibatch_plan[0])
    return OldOutputs(
        outputs.log_probs,
        values if outputs.values is None else outputs.values,
        cost_values if outputs.cost_values is None else outputs.cost_values,
    )


def reference_log_probs(
    policy: TrainedPolicy, batch: Trajectories, share: BatchShare, selections: Sequence[Selection]
) -> Tensor | None:
    """Return the log-probabilities (B, T) under the reference policy.

    Return None where the update reads no reference policy.
    """
    if not policy.needs_reference:
        return None
    (log_probs,) = score_in_passes(
        policy,
        batch,
        share,
        lambda selection: [policy.family.score_by_reference(policy.models, batch, share, selection)],
        selections,
    )
    return log_probs


def estimate_divergence(
    policy: TrainedPolicy,
    inputs: object,
    batch: Trajectories,
    old_log_probs: Tensor,
    reference: Tensor | None,
    share: BatchShare,
    selections: Sequence[Selection],
) -> Tensor:
    """Estimate the KL divergence (B, T), in nats, of the policy from the reference before the first step.

    The divergence is 0 where nothing uses it.
    """
    hyper = policy.hyper
    if not hyper.kl_coef or reference is None:
        return torch.zeros_like(old_log_probs)
    log_probs = old_log_probs
    if policy.settings.is_off_policy:  # the old log-probabilities are those of the policies that wrote the batch
        log_probs = score_all(policy, inputs, batch, batch.mask, share, selections).log_probs
    return kl_estimate(log_probs, reference, hyper.kl_estimator)
