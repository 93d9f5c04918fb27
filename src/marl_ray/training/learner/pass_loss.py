"""The loss of one pass (a micro-batch): this worker's part of the loss of the minibatch over all workers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from marl_ray.algorithms.base import Evaluated
from marl_ray.algorithms.constraints.multipliers import combine
from marl_ray.algorithms.constraints.penalty import pessimistic_cost_surrogate
from marl_ray.algorithms.losses.aggregation import loss_weights
from marl_ray.algorithms.losses.kl import kl_estimate
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.algorithms.losses.value_losses import Valued
from marl_ray.errors import MarlRayError
from marl_ray.training.learner.minibatches import Cut
from marl_ray.training.learner.passes import with_a_row
from marl_ray.training.learner.prepared_batch import PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState

METRICS = ("policy_loss", "value_loss", "cost_value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


class EvaluatedPass:
    """One micro-batch of R rows and T' steps, evaluated by the current weights with gradients."""

    def __init__(self, policy: TrainedPolicy, prepared: PreparedBatch, cut: Cut, first: bool):
        """`first`: no gradient step was taken on this batch yet."""
        shape = prepared.shape
        cut, empty = with_a_row(cut)
        self.cut, mask = cut, cut.take(prepared.mask, shape.agents)
        self.log_probs, self.entropy, self.values, self.cost_values = policy.family.evaluate(
            policy.model, prepared.inputs, prepared.batch, mask, shape, cut
        )
        self.mask = mask & (not empty)
        # Before the first step the present outputs are the old ones. Used again they make every ratio exactly 1; a second
        # pass in bfloat16 would round by more than GSPO's clip range.
        unmoved = first and prepared.recomputed

        def old(now: Tensor | None, then: Tensor) -> Tensor:
            return now.detach() if unmoved and now is not None else cut.take(then, shape.agents)

        self.old_log_probs = old(self.log_probs, prepared.old.log_probs)
        self.old_values = old(self.values, prepared.old.values)
        self.old_cost_values = old(self.cost_values, prepared.old.cost_values)
        self.cost_advantages = cut.take(prepared.cost_advantages, shape.agents)
        self.advantages = cut.take(prepared.advantages, shape.agents)

    @property
    def ratio(self) -> Tensor:
        """(R, T') current over old probability of each decision."""
        return token_ratio(self.log_probs, self.old_log_probs)


def cost_surrogates(policy: TrainedPolicy, evaluated: EvaluatedPass, decisions: float) -> Tensor:
    """(K,) this pass's part of the mean pessimistic cost surrogates over `decisions` of all workers."""
    terms = pessimistic_cost_surrogate(evaluated.ratio[..., None], evaluated.cost_advantages, policy.hyper.clip)
    return (terms * evaluated.mask[..., None]).sum((0, 1)) / max(decisions, 1)


def pass_loss(
    policy: TrainedPolicy,
    state: UpdateState,
    prepared: PreparedBatch,
    one: EvaluatedPass,
    size: Sequence[float],
    gates: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute this pass's part of the minibatch's loss, a scalar with gradients, and of METRICS (7,).

    `size` are the minibatch's (decisions, sequences) over all workers; `gates` (K,) weigh the cost surrogates.
    Raises MarlRayError if the algorithm's loss has another shape than the decisions.
    """
    algorithm, hyper, part, agents = policy.algorithm, policy.hyper, one.cut.take, prepared.shape.agents
    tokens, sequences = size
    weights = loss_weights(one.mask, hyper.aggregation, tokens, sequences, policy.settings.horizon)
    mean = one.mask / max(size[0], 1)
    advantages = one.advantages
    if state.multipliers:  # Lagrangian algorithms learn from the rewards less the priced costs
        strengths = [multiplier.multiplier for multiplier in state.multipliers]
        advantages = combine(advantages, one.cost_advantages, strengths, algorithm.rescale)
    evaluated = Evaluated(
        one.log_probs,
        one.old_log_probs,
        advantages,
        one.mask,
        part(prepared.behaviour_log_probs, agents),
        part(prepared.batch.values, agents),
        None if prepared.reference is None else part(prepared.reference, agents),
    )
    result = algorithm.policy_loss(evaluated, hyper)  # the named algorithm's own formula: a loss per decision
    for key in ("loss", "clipped"):
        given = getattr(getattr(result, key, None), "shape", None)
        if given != one.mask.shape:  # torch would broadcast another shape over the decisions
            raise MarlRayError(
                f"algorithm {algorithm.name}: policy_loss's {key} has shape {given and tuple(given)}, expected "
                f"{tuple(one.mask.shape)}"
            )
    terms = result.loss  # (R, T'); the weights below turn it into this pass's part of the minibatch's mean
    if prepared.importance is not None:
        terms = terms * part(prepared.importance, agents)
    policy_loss = (terms * weights).sum()
    entropy = (one.entropy * weights).sum()
    loss = policy_loss - state.entropy_coef * entropy
    if hyper.kl_coef and evaluated.reference_log_probs is not None and hyper.kl_place == "loss":
        divergence = kl_estimate(one.log_probs, evaluated.reference_log_probs, hyper.kl_estimator)
        loss = loss + state.kl_coef * (divergence * weights).sum()
    if gates.any():
        loss = loss + (gates * cost_surrogates(policy, one, size[0])).sum()
    if algorithm.spec.constraint == "trust_region":
        loss = loss.new_zeros(())  # the actor has its step already
    value, cost_value = _value_losses(policy, prepared, one, mean)
    log_ratio = (one.log_probs - one.old_log_probs).detach().clamp(-20, 20)
    metrics = [
        *(policy_loss, value, cost_value, (one.entropy * mean).sum()),
        *(((log_ratio.exp() - 1 - log_ratio) * mean).sum(), (result.clipped * mean).sum()),
        loss.new_zeros(()),
    ]
    return loss + hyper.value_coef * (value + cost_value), torch.stack(metrics).detach()


def _value_losses(
    policy: TrainedPolicy, prepared: PreparedBatch, one: EvaluatedPass, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The losses of the critic and of all cost critics; `mean` (R, T') weighs decisions. 0 where there is no such critic."""
    algorithm, hyper, part, agents = policy.algorithm, policy.hyper, one.cut.take, prepared.shape.agents
    value, cost_value = one.log_probs.new_zeros(()), one.log_probs.new_zeros(())
    if prepared.returns is not None and one.values is not None:
        valued = Valued(one.values, one.old_values, part(prepared.returns, agents))
        value = (algorithm.value_loss(valued, hyper) * mean).sum()
    if prepared.cost_returns is not None and one.cost_values is not None:
        valued = Valued(one.cost_values, one.old_cost_values, part(prepared.cost_returns, agents))
        signals = zip(*(x.unbind(-1) for x in valued), strict=True)
        cost_value = sum(
            ((algorithm.value_loss(Valued(*one_of), hyper) * mean).sum() for one_of in signals), cost_value
        )
    return value, cost_value
