"""Passes that score a whole batch before its epochs or fit a critic to it, equal however the batch is divided."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from marl_ray.algorithms.losses.critics import ValueLossInputs
from marl_ray.training.collectives import sum_over_workers
from marl_ray.training.learner.families.results import Outputs
from marl_ray.training.learner.minibatches import BatchShare, Selection, micro_batches, whole_batch
from marl_ray.training.learner.optimizers import backward_over_workers, clip_gradients
from marl_ray.training.learner.trained_policy import TrainedPolicy
from marl_ray.trajectories import Trajectories


def with_stand_in_row(selection: Selection) -> Selection:
    """Return a selection of at least one copy, which stands in if the given one is empty.

    A worker without a part of the minibatch still takes part in the collectives of the pass.
    """
    if selection.copies is None or len(selection.copies):
        return selection
    return Selection(torch.zeros(1, dtype=torch.long), selection.times, selection.max_copies, True)


def score_in_passes(
    policy: TrainedPolicy,
    batch: Trajectories,
    share: BatchShare,
    score: Callable[[Selection], Sequence[Tensor | None]],
    selections: Sequence[Selection] | None = None,
) -> list[Tensor | None]:
    """Call `score` on every part of the batch without gradients, and join its outputs (R, T', ...) to (B, T, ...).

    The parts are the micro-batches of the minibatches `selections`, or of the whole batch if it is None. An output that is
    None for a part is None in the result.
    """
    arrays: list[Tensor | None] = []
    order = policy.family.pass_order(policy.model, batch, share.agents)
    number = torch.arange(batch.mask.numel()).view(batch.mask.shape)
    for minibatch in selections or [whole_batch(share)]:
        for part, _ in micro_batches(minibatch, share, policy.pass_size, order):
            selection = with_stand_in_row(part)
            with torch.no_grad():
                pieces = score(selection)
            if selection.copies is None and selection.times is None:
                return list(pieces)
            if not arrays:
                arrays = [None if x is None else x.new_zeros(*batch.mask.shape, *x.shape[2:]) for x in pieces]
            places = selection.take(number, share.agents).flatten().to(batch.mask.device)
            for array, piece in zip(arrays, pieces, strict=True):
                if array is not None and piece is not None and not selection.is_stand_in:
                    array.flatten(0, 1)[places] = piece.flatten(0, 1)
    return arrays


def score_all(
    policy: TrainedPolicy,
    inputs: object,
    batch: Trajectories,
    mask: Tensor,
    share: BatchShare,
    selections: Sequence[Selection] | None = None,
) -> Outputs:
    """Score the whole batch by the current weights, without gradients.

    The outputs are valid where `mask` (B, T) is True. `inputs` are what the family's `encode_inputs` returned. `selections`
    are minibatches that make up the batch: scored in these parts, the outputs have the same bits as those of the
    gradient steps' own passes.
    """

    def score_once(selection: Selection) -> Outputs:
        selected_mask = selection.decisions(mask, share.agents)
        return policy.family.score_decisions(policy.model, inputs, batch, selected_mask, share, selection)

    log_probs, entropy, values, cost_values = score_in_passes(policy, batch, share, score_once, selections)
    assert log_probs is not None and entropy is not None
    return Outputs(log_probs, entropy, values, cost_values)


def fit_critic(policy: TrainedPolicy, inputs: object, batch: Trajectories, mask: Tensor, share: BatchShare) -> Tensor:
    """Fit the critic to its targets before the actor's update and return its outputs (B, T) after the fit.

    For algorithms with `AlgorithmSpec.critic_first`. Moves the critic's weights; only decisions in `mask` (B, T) count.
    """
    hyper, algorithm = policy.hyper, policy.algorithm
    assert algorithm.critic_targets is not None
    targets = algorithm.critic_targets(batch, hyper)
    count = max(float(sum_over_workers(mask.sum().float())), 1.0)
    order = policy.family.pass_order(policy.model, batch, share.agents)
    for _ in range(hyper.critic_epochs):
        policy.optimizer.zero_grad(set_to_none=True)
        for part, _ in micro_batches(whole_batch(share), share, policy.pass_size, order):
            selection = with_stand_in_row(part)
            selected_mask = selection.decisions(mask, share.agents)
            outputs = policy.family.score_decisions(policy.model, inputs, batch, selected_mask, share, selection).values
            assert outputs is not None
            valued = ValueLossInputs(
                outputs, selection.take(batch.values, share.agents), selection.take(targets, share.agents)
            )
            loss = (algorithm.value_loss(valued, hyper) * selected_mask).sum() / count
            backward_over_workers(loss)
        for parameter in policy.actor.parameters():
            parameter.grad = None  # the fit must not move a trunk that the actor shares with the critic
        clip_gradients([nn.ModuleList(policy.critics)], hyper.max_grad_norm)
        policy.optimizer.step()
    values = score_all(policy, inputs, batch, mask, share).values
    assert values is not None
    return values
