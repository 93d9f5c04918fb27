"""The epochs of one batch by gradient descent.

The gradients are the same however the batch is divided into passes and workers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from marl_ray.algorithms.constraints.penalty import exact_penalty_weights
from marl_ray.training.collectives import rank_and_world_size, sum_over_workers
from marl_ray.training.errors import DivergedError
from marl_ray.training.learner.minibatches import Selection, micro_batches
from marl_ray.training.learner.optimizers import backward_over_workers, clip_gradients
from marl_ray.training.learner.pass_loss import PassMetrics, ScoredPass, cost_surrogates, pass_loss
from marl_ray.training.learner.prepared_batch import MinibatchSize, PreparedBatch
from marl_ray.training.learner.trained_policy import TrainedPolicy, UpdateState


def descend(
    policy: TrainedPolicy, state: UpdateState, prepared: PreparedBatch, where: str
) -> tuple[UpdateState, dict[str, float]]:
    """Take all gradient steps on a batch, and return the state and the metrics.

    The metrics are means over the steps. The state has moved multipliers. Moves the weights, but not the actor of a
    trust region. Raises DivergedError naming `where` and a metric that is not finite.
    """
    hyper, moves_actor = policy.hyper, policy.algorithm.spec.constraint != "trust_region"
    rows = iter(prepared.sizes.tolist())
    sums, steps = torch.zeros(len(PassMetrics._fields), device=policy.device), 0
    for epoch in prepared.minibatch_plan:
        before, steps_before = sums.clone(), steps
        for selection in epoch:
            size = MinibatchSize(*next(rows))
            if not size.decisions:
                continue  # no decision is trained on: a step would only follow the optimiser's momentum
            state, metrics = _step(policy, state, prepared, selection, size, steps == 0)
            sums += metrics
            steps += 1
        if (
            moves_actor
            and hyper.target_kl is not None
            and float(sum_over_workers(PassMetrics(*(sums - before)).kl)) / max(steps - steps_before, 1)
            > hyper.target_kl
        ):
            break
    means = dict(zip(PassMetrics._fields, (sum_over_workers(sums) / max(steps, 1)).tolist(), strict=True))
    for name, value in means.items():
        if not math.isfinite(value):
            raise DivergedError(f"{where}: {name} is not finite")
    if policy.algorithm.spec.critic == "none":
        means.pop("value_loss")
    if not policy.budgets:
        means.pop("cost_value_loss")
    return state, means


def _step(
    policy: TrainedPolicy,
    state: UpdateState,
    prepared: PreparedBatch,
    selection: Selection,
    size: MinibatchSize,
    is_first: bool,
) -> tuple[UpdateState, Tensor]:
    """Take one gradient step on a minibatch of this `size`.

    Returns the state, and this worker's part of `PassMetrics`, (7,). `is_first`: no step was taken on this batch yet.
    """
    spec, hyper, costs = policy.algorithm.spec, policy.hyper, prepared.costs
    parts = list(micro_batches(selection, prepared.share, policy.pass_size, prepared.order))
    single_pass = ScoredPass(policy, state, prepared, parts[0][0], is_first) if len(parts) == 1 else None
    gates = torch.zeros(len(policy.budgets), device=policy.device)  # weights of the cost surrogates, for P3O
    if spec.constraint == "penalty":
        gates = _penalty_gates(policy, state, prepared, parts, single_pass, size, is_first)
    policy.optimizer.zero_grad(set_to_none=True)
    metrics = torch.zeros(len(PassMetrics._fields), device=policy.device)
    cost_changes = torch.zeros(len(policy.budgets), device=policy.device)
    for part, last in parts:
        if len(parts) > 1:
            policy.family.begin_pass(policy.model, last)
        current = single_pass if single_pass is not None else ScoredPass(policy, state, prepared, part, is_first)
        # The passes' losses add up to the minibatch's loss, so their gradients add up to its gradient.
        loss, part_metrics = pass_loss(policy, state, prepared, current, size, gates)
        backward_over_workers(loss)
        metrics += part_metrics
        if policy.algorithm.every_step:
            # How much this policy's own steps change the cost; `costs` already contains the changes by the policies
            # before it.
            change = (current.ratio.detach() - 1)[..., None] * current.cost_advantages * current.mask[..., None]
            cost_changes += change.sum((0, 1)) / max(size.decisions, 1)
    if len(parts) > 1:
        policy.family.end_passes(policy.model)
    trained = [policy.actor] if spec.constraint != "trust_region" else []
    critics = policy.critics[1:] if spec.critic_first else policy.critics  # the first is fitted already
    norms = clip_gradients([*trained, nn.ModuleList(critics)] if critics else trained, hyper.max_grad_norm)
    policy.optimizer.step()
    metrics[PassMetrics._fields.index("grad_norm")] = norms[0] / rank_and_world_size()[1]  # a norm is global already
    if policy.algorithm.every_step and costs.means is not None and costs.episodes:
        shift = (sum_over_workers(cost_changes) * costs.decisions).tolist()
        triples = zip(state.multipliers, costs.means, shift, strict=True)
        multipliers = tuple(multiplier.with_cost(mean + change) for multiplier, mean, change in triples)
        state = replace(state, multipliers=multipliers)
    return state, metrics


def _penalty_gates(
    policy: TrainedPolicy,
    state: UpdateState,
    prepared: PreparedBatch,
    parts: Sequence[tuple[Selection, bool]],
    single_pass: ScoredPass | None,
    size: MinibatchSize,
    is_first: bool,
) -> Tensor:
    """Compute the weights of the cost surrogates, (K,).

    The penalty's hinge is around the mean of the whole minibatch, so these passes come before those with gradients.
    """
    sums = torch.zeros(len(policy.budgets), device=policy.device)
    with torch.no_grad():
        for part, _ in parts:
            current = single_pass if single_pass is not None else ScoredPass(policy, state, prepared, part, is_first)
            sums += cost_surrogates(policy, current, size.decisions).detach()
    return exact_penalty_weights(sum_over_workers(sums), prepared.violations, policy.hyper.penalty)
