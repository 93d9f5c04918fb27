"""The loss of one pass (a micro-batch).

It is this worker's part of the loss of the minibatch over all workers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from marl_ray.algorithms.constraints.multipliers import combine_advantages
from marl_ray.algorithms.constraints.penalty import pessimistic_cost_surrogate
from marl_ray.algorithms.definition import PolicyLossInputs
from marl_ray.algorithms.losses.aggregation import loss_weights
from marl_ray.algorithms.losses.critics import ValueLossInputs
from marl_ray.algorithms.losses.kl import kl_estimate
from marl_ray.algorithms.losses.ratios import LOG_RATIO_LIMIT, token_ratio
from marl_ray.errors import MarlRayError
from marl_ray.training.learner.forward_passes import with_stand_in_row
from marl_ray.training.learner.minibatches import Selection
from marl_ray.training.learner.prepared_batch import MinibatchSize, PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState


class PassMetrics(NamedTuple):
    """The metrics of a pass, each a scalar, or one row of a tensor (7,)."""

    policy_loss: Tensor
    value_loss: Tensor
    cost_value_loss: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    grad_norm: Tensor
    """Norm of the actor's gradient, or with a trust region of the critics', in the whole step before clipping.

    A pass has 0."""


class ScoredPass:
    """One micro-batch of R rows and T' steps, scored by the current weights with gradients."""

    def __init__(
        self, policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch, selection: Selection, first: bool
    ):
        """Score the selection; `first` is True before the first gradient step on this batch."""
        share = prepared.share
        selection = with_stand_in_row(selection)
        self.selection, self.mask = selection, selection.decisions(prepared.mask, share.agents)
        self.log_probs, self.entropy, self.values, self.cost_values = policy.family.score_decisions(
            policy.model, prepared.inputs, prepared.batch, self.mask, share, selection, state.entropy_coef > 0
        )
        # Where the learner evaluates the old outputs itself, those before the first step are the present ones. Used again
        # they make every ratio exactly 1; a second pass in bfloat16 would round by more than GSPO's clip range.
        has_old_outputs = first and policy.must_recompute

        def old_output(current: Tensor | None, recorded: Tensor) -> Tensor:
            return (
                current.detach() if has_old_outputs and current is not None else selection.take(recorded, share.agents)
            )

        self.old_log_probs = old_output(self.log_probs, prepared.old.log_probs)
        self.old_values = old_output(self.values, prepared.old.values)
        self.old_cost_values = old_output(self.cost_values, prepared.old.cost_values)
        self.cost_advantages = selection.take(prepared.cost_advantages, share.agents)
        self.advantages = selection.take(prepared.advantages, share.agents)

    @property
    def ratio(self) -> Tensor:
        """(R, T') current over old probability of each decision."""
        return token_ratio(self.log_probs, self.old_log_probs)


def cost_surrogates(policy: TrainedPolicy, scored: ScoredPass, decisions: float) -> Tensor:
    """Return this pass's part (K,) of the mean pessimistic cost surrogates over `decisions` of all workers."""
    terms = pessimistic_cost_surrogate(scored.ratio[..., None], scored.cost_advantages, policy.hyper.clip)
    return (terms * scored.mask[..., None]).sum((0, 1)) / max(decisions, 1)


def pass_loss(
    policy: TrainedPolicy,
    state: UpdateState,
    prepared: PreparedBatch,
    current: ScoredPass,
    size: MinibatchSize,
    gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute this pass's part of the minibatch's loss, a scalar with gradients, and of `PassMetrics` as a tensor (7,).

    `size` is that of the minibatch; `gates` (K,) weigh the cost surrogates.
    Raises MarlRayError if the algorithm's loss has another shape than the decisions.
    """
    algorithm = policy.algorithm
    hyper = policy.hyper
    take = current.selection.take
    agents = prepared.share.agents
    weights = loss_weights(current.mask, hyper.aggregation, size.decisions, size.sequences, policy.settings.horizon)
    decision_weights = current.mask / max(size.decisions, 1)
    advantages = current.advantages
    if state.multipliers:  # Lagrangian algorithms learn from the rewards less the priced costs
        strengths = [multiplier.multiplier for multiplier in state.multipliers]
        advantages = combine_advantages(advantages, current.cost_advantages, strengths, algorithm.rescale)
    inputs = PolicyLossInputs(
        current.log_probs,
        current.old_log_probs,
        advantages,
        current.mask,
        take(prepared.behaviour_log_probs, agents),
        take(prepared.batch.values, agents),
        None if prepared.reference is None else take(prepared.reference, agents),
    )
    result = algorithm.policy_loss(inputs, hyper)  # the named algorithm's own formula: a loss per decision
    for key in ("loss", "clipped"):
        shape = getattr(getattr(result, key, None), "shape", None)
        if shape != current.mask.shape:  # torch would broadcast another shape over the decisions
            raise MarlRayError(
                f"algorithm {algorithm.name}: policy_loss's {key} has shape {shape and tuple(shape)}, expected "
                f"{tuple(current.mask.shape)}"
            )
    terms = result.loss  # (R, T'); the weights below turn it into this pass's part of the minibatch's mean
    if prepared.importance is not None:
        terms = terms * take(prepared.importance, agents)
    policy_loss = (terms * weights).sum()
    entropy = (current.entropy * weights).sum()
    loss = policy_loss - state.entropy_coef * entropy
    if hyper.kl_coef and inputs.reference_log_probs is not None and hyper.kl_place == "loss":
        divergence = kl_estimate(current.log_probs, inputs.reference_log_probs, hyper.kl_estimator)
        loss = loss + state.kl_coef * (divergence * weights).sum()
    if gates.any():
        loss = loss + (gates * cost_surrogates(policy, current, size.decisions)).sum()
    if algorithm.spec.constraint == "trust_region":
        loss = loss.new_zeros(())  # the actor has its step already
    value, cost_value = _value_losses(policy, prepared, current, decision_weights)
    log_ratio = (current.log_probs - current.old_log_probs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = PassMetrics(
        policy_loss=policy_loss,
        value_loss=value,
        cost_value_loss=cost_value,
        entropy=(current.entropy * decision_weights).sum(),
        kl=((log_ratio.exp() - 1 - log_ratio) * decision_weights).sum(),
        clip_fraction=(result.clipped * decision_weights).sum(),
        grad_norm=loss.new_zeros(()),
    )
    return loss + hyper.value_coef * (value + cost_value), torch.stack(metrics).detach()


def _value_losses(
    policy: TrainedPolicy, prepared: PreparedBatch, current: ScoredPass, decision_weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of the critic and of all cost critics; 0 where there is no such critic.

    `decision_weights` (R, T') are 1 over the number of decisions, and 0 where none is trained on.
    """
    algorithm = policy.algorithm
    hyper = policy.hyper
    take = current.selection.take
    agents = prepared.share.agents
    value, cost_value = current.log_probs.new_zeros(()), current.log_probs.new_zeros(())
    if prepared.returns is not None and current.values is not None:
        valued = ValueLossInputs(current.values, current.old_values, take(prepared.returns, agents))
        value = (algorithm.value_loss(valued, hyper) * decision_weights).sum()
    if prepared.cost_returns is not None and current.cost_values is not None:
        valued = ValueLossInputs(current.cost_values, current.old_cost_values, take(prepared.cost_returns, agents))
        signals = zip(*(x.unbind(-1) for x in valued), strict=True)
        cost_value = sum(
            ((algorithm.value_loss(ValueLossInputs(*signal), hyper) * decision_weights).sum() for signal in signals),
            cost_value,
        )
    return value, cost_value
