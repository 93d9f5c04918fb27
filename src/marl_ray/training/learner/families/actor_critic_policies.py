"""Actor-critics as the learner needs them.

Their networks are small and gathered as one group; the rollout copy is on CPU.
"""

import copy
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from marl_ray.policies.actor_critic.policy import ActorCritic, EncodedRows
from marl_ray.training.collectives import rank_and_world_size
from marl_ray.training.learner.families.results import Outputs, PolicyModels
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.trajectories import Trajectories


class EncodedInputs(NamedTuple):
    """Encoded inputs of a batch."""

    actor: EncodedRows
    critic: EncodedRows


def set_up(
    model: ActorCritic, mesh: DeviceMesh, mixed_precision: bool, reference: bool, engine_has_weights: bool
) -> PolicyModels:
    """Shard a copy of `model` for training; `model` itself becomes the rollout copy."""
    device = torch.device(mesh.device_type)
    trained = copy.deepcopy(model).to(device)
    fixed = copy.deepcopy(model.actor).to(device).requires_grad_(False) if reference else None
    model.requires_grad_(False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed_precision else MixedPrecisionPolicy()
    # The whole policy is one group: one gather and one reduction per gradient step. Its networks are small, so the
    # gathered weights stay until the backward pass.
    fully_shard(trained, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return PolicyModels(trained, model, fixed)


def begin_pass(model: ActorCritic, last: bool) -> None:
    """Gather the weights once, and add the gradients up over the workers once, because such models fit in memory."""
    sharded = cast(FSDPModule, model)
    sharded.set_requires_gradient_sync(last)
    sharded.set_reshard_after_backward(last)


def end_passes(model: ActorCritic) -> None:
    """Do nothing, because the last pass has released the gathered weights."""


def actor(model: ActorCritic) -> nn.Module:
    """Return the network that chooses actions."""
    return model.actor


def critics(model: ActorCritic) -> list[nn.Module]:
    """Return the critic and the cost critic, as far as the algorithm has them."""
    return list(model.critics)


def joint_workers(model: ActorCritic) -> int:
    """Return 1: every worker computes its own passes."""
    return 1


def holds_weights(rollout: ActorCritic) -> bool:
    """Return True: the rollout copy plays itself."""
    return True


def refresh_rollout(models: PolicyModels, mixed_precision: bool, where: str) -> None:
    """Gather the sharded weights, and copy them into the rollout copy; every worker takes part."""
    sharded = cast(FSDPModule, models.trained)
    if not mixed_precision:
        sharded.unshard()  # one gather for all parameters; mixed precision would round them
    with torch.no_grad():
        for plain, parameter in zip(models.rollout.parameters(), models.trained.parameters(), strict=True):
            plain.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    sharded.reshard()


def adopt_actor(models: PolicyModels, parameters: Mapping[str, Tensor]) -> None:
    """Give the rollout copy's and the sharded actor these weights, which are equal on all workers."""
    with torch.no_grad():
        for plain, value in zip(models.rollout.actor.parameters(), parameters.values(), strict=True):
            plain.copy_(value)
        for plain, parameter in zip(models.rollout.actor.parameters(), models.trained.actor.parameters(), strict=True):
            sharded = cast(DTensor, parameter)
            moved = plain.to(sharded.device)
            sharded.copy_(distribute_tensor(moved, sharded.device_mesh, sharded.placements, src_data_rank=None))


def pad_batch(batch: Trajectories, agents: int) -> Trajectories:
    """Return the batch as it is: every worker has at least one copy."""
    return batch  # no worker is without copies


def copy_bounds(batch: Trajectories, agents: int) -> tuple[int, ...]:
    """Return equal steps: all workers have equally many copies."""
    copies = len(batch.mask) // agents
    return tuple(range(0, (rank_and_world_size()[1] + 1) * copies, copies))


def pass_order(model: ActorCritic, batch: Trajectories, agents: int) -> Tensor | None:
    """Return None: no order of copies makes a pass cheaper."""
    return None


def encode_inputs(model: ActorCritic, batch: Trajectories) -> EncodedInputs:
    """Encode the inputs of actor and critics."""
    actor_rows = EncodedRows.from_rows(model.actor, batch.observations.flatten(0, 1))
    if not model.critics or not model.central:
        # Both networks of a local critic read the same rows, whose encoding depends on no weights.
        return EncodedInputs(actor_rows, actor_rows)
    assert batch.states is not None
    return EncodedInputs(actor_rows, EncodedRows.from_rows(model.critics[0], batch.states.flatten(0, 1)))


def score_decisions(
    model: ActorCritic,
    inputs: EncodedInputs,
    batch: Trajectories,
    mask: Tensor,
    share: BatchShare,
    selection: Selection,
    learn_entropy: bool = False,
) -> Outputs:
    """Score the selection (R rows, T' steps) of a batch by the model, also the decisions outside of `mask`."""
    rows = None if batch.action_masks is None else selection.take(batch.action_masks, share.agents).flatten(0, 1)
    heads, size = share.agents if model.central else 1, mask.shape
    outputs, *values = model.evaluate(
        selection.rows(inputs.actor, share, share.agents),
        selection.rows(inputs.critic, share, share.agents // heads),
        rows,
    )
    actions = selection.take(batch.actions, share.agents).flatten(0, 1)
    named = iter(values)
    return Outputs(
        model.distribution.log_prob(outputs, actions).reshape(size),
        model.distribution.entropy(outputs).reshape(size),
        _by_row(next(named), heads, size)[..., 0] if model.critic is not None else None,
        _by_row(next(named), heads, size) if model.cost_critic is not None else None,
    )


def _by_row(values: Tensor, heads: int, size: torch.Size) -> Tensor:
    """Reshape critic outputs (copies * T, heads * K) or (rows * T, K) to (R, T', K)."""
    rows, steps = size
    return values.reshape(rows // heads, steps, heads, -1).transpose(1, 2).reshape(rows, steps, -1)


def score_by_reference(models: PolicyModels, batch: Trajectories, share: BatchShare, selection: Selection) -> Tensor:
    """Return the log-probabilities (R, T') of the selection's actions under the reference actor."""
    distribution = models.trained.distribution
    allowed = None if batch.action_masks is None else selection.take(batch.action_masks, share.agents).flatten(0, 1)
    observations = selection.take(batch.observations, share.agents)
    outputs = distribution.normalize(models.reference.infer(observations.flatten(0, 1)), allowed)
    actions = selection.take(batch.actions, share.agents).flatten(0, 1)
    return cast(Tensor, distribution.log_prob(outputs, actions).reshape(observations.shape[:2]))


def log_ratio(rollout: ActorCritic, batch: Trajectories) -> Tensor:
    """Return the log ratio (copies, T) of the agents' recorded actions, on CPU.

    The ratio is the actions' log-probability now, minus that when they were sampled.
    """
    distribution = rollout.distribution
    allowed = None if batch.action_masks is None else batch.action_masks.flatten(0, 1)
    outputs = distribution.normalize(rollout.actor.infer(batch.observations.flatten(0, 1)), allowed)
    new = distribution.log_prob(outputs, batch.actions.flatten(0, 1)).reshape(batch.mask.shape)
    ratios: Tensor = torch.where(batch.mask, new - batch.log_probs, 0.0).unflatten(0, (-1, batch.agents)).sum(1)
    return ratios
