"""The epochs of one batch by gradient descent: the same gradients however the batch is cut into passes and workers."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from marl_ray.algorithms.base import Evaluated
from marl_ray.algorithms.constraints.multipliers import combine
from marl_ray.algorithms.constraints.penalty import exact_penalty_weights, pessimistic_cost_surrogate
from marl_ray.algorithms.losses.aggregation import loss_weights
from marl_ray.algorithms.losses.kl import kl_estimate
from marl_ray.algorithms.losses.ratios import token_ratio
from marl_ray.algorithms.losses.value_losses import Valued
from marl_ray.errors import MarlRayError
from marl_ray.training.collectives import total, world
from marl_ray.training.learner.family import Outputs
from marl_ray.training.learner.minibatches import Cut, Shape, everything, micro_batches
from marl_ray.training.learner.prepared_batch import CostStats, Diverged, Fixed
from marl_ray.trajectories import Trajectories

if TYPE_CHECKING:
    from marl_ray.training.learner.learner import Learner

METRICS = ("policy_loss", "value_loss", "cost_value_loss", "entropy", "kl", "clip_fraction", "grad_norm")


def update(
    learner: "Learner",
    fixed: Fixed,
    shape: Shape,
    plan: list[list[Cut]],
    violations: Tensor,
    costs: CostStats,
    where: str,
) -> dict[str, float]:
    """All epochs; metrics are means over the gradient steps. A trust region's actor is left alone, not its critics."""
    hyper, by_gradient = learner.hyper, learner.algorithm.spec.constraint != "trust_region"
    rows = iter(fixed.sizes.tolist())
    sums, steps = torch.zeros(len(METRICS), device=learner.device), 0
    for epoch in plan:
        before = sums.clone()
        for cut in epoch:
            size = next(rows)
            if not size[0]:
                continue  # nothing to learn from: a step would only follow the optimiser's momentum
            sums += _step(learner, fixed, shape, cut, size, violations, costs, steps == 0)
            steps += 1
        if (
            by_gradient
            and hyper.target_kl is not None
            and float(total((sums - before)[4])) / len(epoch) > hyper.target_kl
        ):
            break
    means = dict(zip(METRICS, (total(sums) / max(steps, 1)).tolist(), strict=True))
    for name, value in means.items():
        if not math.isfinite(value):
            raise Diverged(f"{where}: {name} is not finite")
    if learner.algorithm.spec.critic == "none":
        means.pop("value_loss")
    if not learner.budgets:
        means.pop("cost_value_loss")
    return means


class _Pass:
    """One micro-batch, evaluated."""

    def __init__(self, learner: "Learner", fixed: Fixed, shape: Shape, cut: Cut, first: bool):
        """`first`: no gradient step was taken on this batch yet."""
        cut, empty = _with_a_row(cut)
        self.cut, mask = cut, cut.of(fixed.mask, shape.agents)
        self.log_probs, self.entropy, self.values, self.cost_values = learner.family.evaluate(
            learner.model, fixed.inputs, fixed.batch, mask, shape, cut
        )
        self.mask = mask & (not empty)
        # Bit for bit: GSPO's clip is narrower than the rounding of bfloat16.
        unmoved = first and fixed.recomputed

        def old(now: Tensor | None, then: Tensor) -> Tensor:
            return now.detach() if unmoved and now is not None else cut.of(then, shape.agents)

        self.old_log_probs = old(self.log_probs, fixed.old_log_probs)
        self.old_values = old(self.values, fixed.old_values)
        self.old_cost_values = old(self.cost_values, fixed.old_cost_values)
        self.cost_advantages = cut.of(fixed.cost_advantages, shape.agents)
        self.advantages = cut.of(fixed.advantages, shape.agents)

    @property
    def ratio(self) -> Tensor:
        return token_ratio(self.log_probs, self.old_log_probs)


def _with_a_row(cut: Cut) -> tuple[Cut, bool]:
    """A cut of one copy at least, and whether it was of none: that worker has no part of the minibatch, but its part in
    the collectives of the pass."""
    empty = cut.copies is not None and not len(cut.copies)
    return (Cut(torch.zeros(1, dtype=torch.long), cut.times, cut.most) if empty else cut), empty


def _step(
    learner: "Learner",
    fixed: Fixed,
    shape: Shape,
    cut: Cut,
    size: Sequence[float],
    violations: Tensor,
    costs: CostStats,
    first: bool,
) -> Tensor:
    """One gradient step on a minibatch of `size` (decisions, sequences) over all workers; this worker's part of METRICS."""
    spec, hyper = learner.algorithm.spec, learner.hyper
    sharded = cast(FSDPModule, learner.model)
    parts = list(micro_batches(cut, shape, learner.pass_copies, fixed.order))
    whole = _Pass(learner, fixed, shape, parts[0][0], first) if len(parts) == 1 else None
    gates = torch.zeros(len(learner.budgets), device=learner.device)
    if spec.constraint == "penalty":
        gates = _penalty_gates(learner, fixed, shape, parts, whole, size, violations, first)
    learner.optimizer.zero_grad(set_to_none=True)
    metrics = torch.zeros(len(METRICS), device=learner.device)
    moved = torch.zeros(len(learner.budgets), device=learner.device)
    for part, last in parts:
        if len(parts) > 1 and learner.family.accumulates:  # gather the weights once, reduce the gradients once
            sharded.set_requires_gradient_sync(last)
            sharded.set_reshard_after_backward(last)
        one = whole if whole is not None else _Pass(learner, fixed, shape, part, first)
        loss, described = _loss(learner, fixed, shape, one, size, gates)
        # FSDP2 averages gradients over workers; each worker's sum over the global count, times the workers, is the mean.
        (loss * world()[1]).backward()
        metrics += described
        if learner.algorithm.every_step:
            # The cost that this policy's own steps have moved: what policies before it moved is in `costs` already.
            change = (one.ratio.detach() - 1)[..., None] * one.cost_advantages * one.mask[..., None]
            moved += change.sum((0, 1)) / max(size[0], 1)
    trained = [learner.actor] if spec.constraint != "trust_region" else []
    critics = learner.critics if not spec.critic_first else []
    norms = clip_gradients([*trained, nn.ModuleList(critics)] if critics else trained, hyper.max_grad_norm)
    learner.optimizer.step()
    metrics[-1] = norms[0] / world()[1]  # a norm is global already
    if learner.algorithm.every_step and costs.means is not None and costs.episodes:
        shift = (total(moved) * costs.decisions).tolist()
        triples = zip(learner.multipliers, costs.means, shift, strict=True)
        learner.multipliers = tuple(multiplier.updated(mean + change) for multiplier, mean, change in triples)
    return metrics


def _penalty_gates(
    learner: "Learner",
    fixed: Fixed,
    shape: Shape,
    parts: Sequence[tuple[Cut, bool]],
    whole: _Pass | None,
    size: Sequence[float],
    violations: Tensor,
    first: bool,
) -> Tensor:
    """Weights of the cost surrogates, (K,): the hinge is around the mean of the whole minibatch, so it comes first."""
    sums = torch.zeros(len(learner.budgets), device=learner.device)
    with torch.no_grad():
        for part, _ in parts:
            one = whole if whole is not None else _Pass(learner, fixed, shape, part, first)
            sums += _cost_surrogates(learner, one, size[0]).detach()
    return exact_penalty_weights(total(sums), violations, learner.hyper.penalty)


def _cost_surrogates(learner: "Learner", one: _Pass, decisions: float) -> Tensor:
    """(K,) this pass's part of the mean pessimistic cost surrogates."""
    terms = pessimistic_cost_surrogate(one.ratio[..., None], one.cost_advantages, learner.hyper.clip)
    return (terms * one.mask[..., None]).sum((0, 1)) / max(decisions, 1)


def _loss(
    learner: "Learner", fixed: Fixed, shape: Shape, one: _Pass, size: Sequence[float], gates: Tensor
) -> tuple[Tensor, Tensor]:
    """This pass's part of the global loss, and of METRICS."""
    algorithm, hyper, part, agents = learner.algorithm, learner.hyper, one.cut.of, shape.agents
    tokens, sequences = size
    weights = loss_weights(one.mask, hyper.aggregation, tokens, sequences, learner.horizon)
    mean = one.mask / max(size[0], 1)
    advantages = one.advantages
    if learner.multipliers:
        strengths = [multiplier.multiplier for multiplier in learner.multipliers]
        advantages = combine(advantages, one.cost_advantages, strengths, algorithm.rescale)
    evaluated = Evaluated(
        one.log_probs,
        one.old_log_probs,
        advantages,
        one.mask,
        part(fixed.behaviour_log_probs, agents),
        part(fixed.batch.values, agents),
        None if fixed.reference is None else part(fixed.reference, agents),
    )
    result = algorithm.policy_loss(evaluated, hyper)
    for key in ("loss", "clipped"):
        found = getattr(getattr(result, key, None), "shape", None)
        if found != one.mask.shape:  # another shape would be spread over the decisions
            raise MarlRayError(
                f"algorithm {algorithm.name}: policy_loss's {key} has shape {found and tuple(found)}, expected "
                f"{tuple(one.mask.shape)}"
            )
    terms = result.loss
    if fixed.importance is not None:
        terms = terms * part(fixed.importance, agents)
    policy = (terms * weights).sum()
    entropy = (one.entropy * weights).sum()
    loss = policy - learner.entropy_coef * entropy
    if hyper.kl_coef and evaluated.reference_log_probs is not None and hyper.kl_place == "loss":
        divergence = kl_estimate(one.log_probs, evaluated.reference_log_probs, hyper.kl_estimator)
        loss = loss + learner.kl_coef * (divergence * weights).sum()
    if gates.any():
        loss = loss + (gates * _cost_surrogates(learner, one, size[0])).sum()
    if algorithm.spec.constraint == "trust_region":
        loss = loss.new_zeros(())  # the actor has its step already
    value, cost_value = loss.new_zeros(()), loss.new_zeros(())
    if fixed.returns is not None and one.values is not None:
        valued = Valued(one.values, one.old_values, part(fixed.returns, agents))
        value = (algorithm.value_loss(valued, hyper) * mean).sum()
    if fixed.cost_returns is not None and one.cost_values is not None:
        valued = Valued(one.cost_values, one.old_cost_values, part(fixed.cost_returns, agents))
        signals = zip(*(x.unbind(-1) for x in valued), strict=True)
        cost_value = sum(
            ((algorithm.value_loss(Valued(*one_of), hyper) * mean).sum() for one_of in signals), cost_value
        )
    log_ratio = (one.log_probs - one.old_log_probs).detach().clamp(-20, 20)
    described = [
        *(policy, value, cost_value, (one.entropy * mean).sum()),
        *(((log_ratio.exp() - 1 - log_ratio) * mean).sum(), (result.clipped * mean).sum()),
        loss.new_zeros(()),
    ]
    return loss + hyper.value_coef * (value + cost_value), torch.stack(described).detach()


def fit_critic(learner: "Learner", inputs: Any, batch: Trajectories, mask: Tensor, shape: Shape) -> Tensor:
    """Fit the critic to its targets before the actor's update; its outputs (B, T) afterwards."""
    hyper, algorithm = learner.hyper, learner.algorithm
    assert algorithm.critic_targets is not None
    wanted = algorithm.critic_targets(batch, hyper)
    count = max(float(total(mask.sum().float())), 1.0)
    order = learner.family.order(learner.model, batch, shape.agents)
    for _ in range(hyper.critic_epochs):
        learner.optimizer.zero_grad(set_to_none=True)
        for part, _ in micro_batches(everything(shape), shape, learner.pass_copies, order):
            cut, empty = _with_a_row(part)
            own = cut.of(mask, shape.agents)
            outputs = learner.family.evaluate(learner.model, inputs, batch, own, shape, cut).values
            assert outputs is not None
            valued = Valued(outputs, cut.of(batch.values, shape.agents), cut.of(wanted, shape.agents))
            loss = (algorithm.value_loss(valued, hyper) * (own & (not empty))).sum() / count
            (loss * world()[1]).backward()
        for parameter in learner.actor.parameters():
            parameter.grad = None  # of a trunk that both share: it is the actor's
        clip_gradients([nn.ModuleList(learner.critics)], hyper.max_grad_norm)
        learner.optimizer.step()
    values = evaluate_all(learner, inputs, batch, mask, shape).values
    assert values is not None
    return values


def evaluate_all(
    learner: "Learner",
    inputs: Any,
    batch: Trajectories,
    mask: Tensor,
    shape: Shape,
    cuts: Sequence[Cut] | None = None,
) -> Outputs:
    """The whole batch by the trainer's weights as they are, without gradients; right where `mask` (B, T) is True.

    `cuts` are minibatches that make up the batch: their passes give, to the bit, what the same passes with gradients give.
    """

    def one(cut: Cut) -> Outputs:
        own = cut.of(mask, shape.agents)
        return learner.family.evaluate(learner.model, inputs, batch, own, shape, cut)

    log_probs, entropy, values, cost_values = in_passes(learner, batch, shape, one, cuts)
    assert log_probs is not None and entropy is not None
    return Outputs(log_probs, entropy, values, cost_values)


def in_passes(
    learner: "Learner",
    batch: Trajectories,
    shape: Shape,
    evaluate: Callable[[Cut], Sequence[Tensor | None]],
    cuts: Sequence[Cut] | None = None,
) -> list[Tensor | None]:
    """(B, T, ...) tensors from their parts (R, T', ...), pass by pass, without gradients; None stays None.

    Passes are of the minibatches `cuts`, of the whole batch when not given.
    """
    whole: list[Tensor | None] = []
    order = learner.family.order(learner.model, batch, shape.agents)
    number = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    for minibatch in cuts or [everything(shape)]:
        for part, _ in micro_batches(minibatch, shape, learner.pass_copies, order):
            cut, empty = _with_a_row(part)
            with torch.no_grad():
                found = evaluate(cut)
            if cut.copies is None and cut.times is None:
                return list(found)
            if not whole:
                whole = [None if x is None else x.new_zeros(*batch.mask.shape, *x.shape[2:]) for x in found]
            places = cut.of(number, shape.agents).flatten().to(batch.mask.device)
            for array, piece in zip(whole, found, strict=True):
                if array is not None and piece is not None and not empty:
                    array.flatten(0, 1)[places] = piece.flatten(0, 1)
    return whole


def clip_gradients(modules: Sequence[nn.Module], max_norm: float) -> Tensor:
    """Scale each module's sharded gradients to at most `max_norm`, each by its own global norm; returns the norms.

    One reduction for all modules, where `torch.nn.utils.clip_grad_norm_` would need one for each.
    """
    shards = [[_local(p.grad) for p in module.parameters() if p.grad is not None] for module in modules]
    squares = torch.stack([torch.stack([g.float().square().sum() for g in group]).sum() for group in shards])
    norms = total(squares).sqrt()
    for group, norm in zip(shards, norms, strict=True):
        torch._foreach_mul_(group, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norms


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
