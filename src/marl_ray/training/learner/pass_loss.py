"""The loss of one pass (a micro-batch).

It is this worker's part of the loss of the minibatch over all workers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from marl_ray.algorithms.base import PolicyLossInputs
from marl_ray.algorithms.constraints.multipliers import combine_advantages
from marl_ray.algorithms.constraints.penalty import pessimistic_cost_surrogate
from marl_ray.algorithms.losses.aggregation import loss_weights
from marl_ray.algorithms.losses.critics import ValueLossInputs
from marl_ray.algorithms.losses.kl import kl_estimate
from marl_ray.algorithms.losses.ratios import LOG_RATIO_LIMIT, token_ratio
from marl_ray.errors import MarlRayError
from marl_ray.training.learner.forward_passes import with_stand_in_row
from marl_ray.training.learner.minibatches import Selection
from marl_ray.training.learner.prepared_batch import PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState

METRICS = ("policy_loss", "value_loss", "cost_value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


class EvaluatedPass:
    """One micro-batch of R rows and T' steps, evaluated by the current weights with gradients."""

    def __init__(
        self, policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch, selection: Selection, first: bool
    ):
        """Evaluate the selection; `first` is True before the first gradient step on this batch."""
        shape = prepared.shape
        selection = with_stand_in_row(selection)
        self.selection, self.mask = selection, selection.decisions(prepared.mask, shape.agents)
        self.log_probs, self.entropy, self.values, self.cost_values = policy.family.score_decisions(
            policy.model, prepared.inputs, prepared.batch, self.mask, shape, selection, state.entropy_coef > 0
        )
        # Before the first step the present outputs are the old ones. Used again they make every ratio exactly 1; a second
        # pass in bfloat16 would round by more than GSPO's clip range.
        unmoved = first and prepared.recomputed

        def old_output(current: Tensor | None, recorded: Tensor) -> Tensor:
            return current.detach() if unmoved and current is not None else selection.take(recorded, shape.agents)

        self.old_log_probs = old_output(self.log_probs, prepared.old.log_probs)
        self.old_values = old_output(self.values, prepared.old.values)
        self.old_cost_values = old_output(self.cost_values, prepared.old.cost_values)
        self.cost_advantages = selection.take(prepared.cost_advantages, shape.agents)
        self.advantages = selection.take(prepared.advantages, shape.agents)

    @property
    def ratio(self) -> Tensor:
        """(R, T') current over old probability of each decision."""
        return token_ratio(self.log_probs, self.old_log_probs)


def cost_surrogates(policy: TrainedPolicy, evaluated: EvaluatedPass, decisions: float) -> Tensor:
    """Return this pass's part (K,) of the mean pessimistic cost surrogates over `decisions` of all workers."""
    terms = pessimistic_cost_surrogate(evaluated.ratio[..., None], evaluated.cost_advantages, policy.hyper.clip)
    return (terms * evaluated.mask[..., None]).sum((0, 1)) / max(decisions, 1)


def pass_loss(
    policy: TrainedPolicy,
    state: UpdateState,
    prepared: PreparedBatch,
    current: EvaluatedPass,
    size: Sequence[float],
    gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute this pass's part of the minibatch's loss, a scalar with gradients, and of METRICS (7,).

    `size` are the minibatch's (decisions, sequences) over all workers; `gates` (K,) weigh the cost surrogates.
    Raises MarlRayError if the algorithm's loss has another shape than the decisions.
    """
    algorithm = policy.algorithm
    hyper = policy.hyper
    part = current.selection.take
    agents = prepared.shape.agents
    tokens, sequences = size
    weights = loss_weights(current.mask, hyper.aggregation, tokens, sequences, policy.settings.horizon)
    mean = current.mask / max(size[0], 1)
    advantages = current.advantages
    if state.multipliers:  # Lagrangian algorithms learn from the rewards less the priced costs
        strengths = [multiplier.multiplier for multiplier in state.multipliers]
        advantages = combine_advantages(advantages, current.cost_advantages, strengths, algorithm.rescale)
    decisions = PolicyLossInputs(
        current.log_probs,
        current.old_log_probs,
        advantages,
        current.mask,
        part(prepared.behaviour_log_probs, agents),
        part(prepared.batch.values, agents),
        None if prepared.reference is None else part(prepared.reference, agents),
    )
    result = algorithm.policy_loss(decisions, hyper)  # the named algorithm's own formula: a loss per decision
    for key in ("loss", "clipped"):
        shape = getattr(getattr(result, key, None), "shape", None)
        if shape != current.mask.shape:  # torch would broadcast another shape over the decisions
            raise MarlRayError(
                f"algorithm {algorithm.name}: policy_loss's {key} has shape {shape and tuple(shape)}, expected "
                f"{tuple(current.mask.shape)}"
            )
    terms = result.loss  # (R, T'); the weights below turn it into this pass's part of the minibatch's mean
    if prepared.importance is not None:
        terms = terms * part(prepared.importance, agents)
    policy_loss = (terms * weights).sum()
    entropy = (current.entropy * weights).sum()
    loss = policy_loss - state.entropy_coef * entropy
    if hyper.kl_coef and decisions.reference_log_probs is not None and hyper.kl_place == "loss":
        divergence = kl_estimate(current.log_probs, decisions.reference_log_probs, hyper.kl_estimator)
        loss = loss + state.kl_coef * (divergence * weights).sum()
    if gates.any():
        loss = loss + (gates * cost_surrogates(policy, current, size[0])).sum()
    if algorithm.spec.constraint == "trust_region":
        loss = loss.new_zeros(())  # the actor has its step already
    value, cost_value = _value_losses(policy, prepared, current, mean)
    log_ratio = (current.log_probs - current.old_log_probs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = [
        *(policy_loss, value, cost_value, (current.entropy * mean).sum()),
        *(((log_ratio.exp() - 1 - log_ratio) * mean).sum(), (result.clipped * mean).sum()),
        loss.new_zeros(()),
    ]
    return loss + hyper.value_coef * (value + cost_value), torch.stack(metrics).detach()


def _value_losses(
    policy: TrainedPolicy, prepared: PreparedBatch, current: EvaluatedPass, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of the critic and of all cost critics; 0 where there is no such critic.

    `mean` (R, T') weighs decisions.
    """
    algorithm = policy.algorithm
    hyper = policy.hyper
    part = current.selection.take
    agents = prepared.shape.agents
    value, cost_value = current.log_probs.new_zeros(()), current.log_probs.new_zeros(())
    if prepared.returns is not None and current.values is not None:
        valued = ValueLossInputs(current.values, current.old_values, part(prepared.returns, agents))
        value = (algorithm.value_loss(valued, hyper) * mean).sum()
    if prepared.cost_returns is not None and current.cost_values is not None:
        valued = ValueLossInputs(current.cost_values, current.old_cost_values, part(prepared.cost_returns, agents))
        signals = zip(*(x.unbind(-1) for x in valued), strict=True)
        cost_value = sum(
            ((algorithm.value_loss(ValueLossInputs(*of_signal), hyper) * mean).sum() for of_signal in signals),
            cost_value,
        )
    return value, cost_value
