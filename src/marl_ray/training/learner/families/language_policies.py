"""Language models as the learner needs them.

They are sharded block by block; the rollout copy is on the learner's device.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from marl_ray.errors import MarlRayError
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.policies.language import sampling_copy
from marl_ray.policies.language.sampling_copy import empty_copy, frozen_copy, plain_copy
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.token_policy import TokenPolicy, move_to_device
from marl_ray.training.collectives import rank_and_world_size, sum_over_workers
from marl_ray.training.errors import raise_gather_error
from marl_ray.training.learner.families.results import Outputs, PolicyModels
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.trajectories import Trajectories


def set_up(
    model: TokenPolicy, mesh: DeviceMesh, mixed_precision: bool, reference: bool, engine_has_weights: bool
) -> PolicyModels:
    """Shard `model`, which becomes the trained policy.

    With adapters the reference is the same model without them. A policy that is sampled elsewhere gets an empty copy,
    if its weights are in files.
    """
    fixed: TokenPolicy | None = None
    if reference:
        fixed = model
        if model.config.lora is None:
            fixed = frozen_copy(model)
            shard(fixed, mesh, mixed_precision)
    device = torch.device(mesh.device_type)
    move_to_device(model, device)
    empty = engine_has_weights and model.unread is not None
    rollout = empty_copy(model, device) if empty else plain_copy(model, device)
    shard(model, mesh, mixed_precision)
    return PolicyModels(model, rollout, fixed)


def begin_pass(model: TokenPolicy, last: bool) -> None:
    """Begin a pass, and let groups of workers add their gradients up in the last pass alone.

    The weights of a small model stay gathered from the first pass to the last.
    """
    sharded = cast(FSDPModule, model)
    sharded.set_is_last_backward(last)
    sharded.set_requires_all_reduce(last)
    assert model.sharded is not None
    if model.sharded.gathers_once:
        sharded.set_reshard_after_forward(False)
        sharded.set_reshard_after_backward(last)


def end_passes(model: TokenPolicy) -> None:
    """Let passes without gradients release what they gather: the next step would make it stale."""
    cast(FSDPModule, model).set_reshard_after_forward(True)


def actor(model: TokenPolicy) -> nn.Module:
    """Return the language model itself."""
    return cast(nn.Module, model.lm)


def critics(model: TokenPolicy) -> list[nn.Module]:
    """Return the value heads, as far as the algorithm has them."""
    return list(model.heads)


def joint_workers(model: TokenPolicy) -> int:
    """Return the number of neighbouring workers that compute each pass together."""
    return 1 if model.joint is None else model.joint.count


def holds_weights(rollout: TokenPolicy) -> bool:
    """Return False for an empty copy, whose weights an engine has."""
    return rollout.source is None


def refresh_rollout(models: PolicyModels, mixed_precision: bool, where: str) -> None:
    """Gather the trained weights that the rollout copy holds, and copy them into it.

    Every worker takes part. Where one fails, all raise its error, which names `where` if there was no room.
    """

    def refresh_own() -> None:
        with raise_gather_error(where):
            sampling_copy.refresh(models.rollout, models.trained)

    run_on_all_workers(refresh_own)


def adopt_actor(models: PolicyModels, parameters: Mapping[str, Tensor]) -> NoReturn:
    """Raise MarlRayError: second-order steps are for small policies."""
    raise MarlRayError("algorithm: a trust region trains actor-critics, not language models")


def pad_batch(batch: Trajectories, agents: int) -> Trajectories:
    """Add an empty response (or an empty pair of responses), which counts nowhere, to a batch without rows."""
    if len(batch.mask):
        return batch
    row: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        row[field.name] = None if value is None else value.new_zeros(agents, *value.shape[1:])
    assert batch.prompts is not None
    return Trajectories(**row | {"greedy": ~row["greedy"], "prompts": row["prompts"] - 1})


def copy_bounds(batch: Trajectories, agents: int) -> tuple[int, ...]:
    """Exchange the numbers of rows, which differ between workers.

    A copy is one row, or a pair of rows with `agents` = 2.
    """
    rank, workers = rank_and_world_size()
    rows = torch.zeros(workers, dtype=torch.int64, device=batch.mask.device)
    rows[rank] = len(batch.mask) // agents
    return (0, *sum_over_workers(rows).cumsum(0).tolist())


def pass_order(model: TokenPolicy, batch: Trajectories, agents: int) -> Tensor | None:
    """Return (copies,) numbers by which copies of like length and equal prompts share a pass; never None."""
    assert batch.prompts is not None
    return model.order(batch.prompts, batch.mask)[::agents]


def encode_inputs(model: TokenPolicy, batch: Trajectories) -> None:
    """Return None: a language model reads the batch's token ids as they are."""
    return


def score_decisions(
    model: TokenPolicy,
    inputs: None,
    batch: Trajectories,
    mask: Tensor,
    share: BatchShare,
    selection: Selection,
    learn_entropy: bool = False,
) -> Outputs:
    """Score the selection (R rows, T' tokens) of a batch by the model, where `mask` (R, T') is True."""
    assert batch.prompts is not None
    prompts, responses = (selection.take(x, share.agents) for x in (batch.prompts, batch.actions))
    outputs = model.evaluate(prompts, responses, mask, learn_entropy=learn_entropy)
    return Outputs(outputs.log_probs, outputs.entropy, outputs.values, outputs.cost_values)


def score_by_reference(models: PolicyModels, batch: Trajectories, share: BatchShare, selection: Selection) -> Tensor:
    """Return the log-probabilities (R, T') of the selection's tokens under the reference model."""
    assert batch.prompts is not None
    prompts, responses = (selection.take(x, share.agents) for x in (batch.prompts, batch.actions))
    mask = selection.decisions(batch.mask, share.agents)
    return cast(TokenPolicy, models.reference).reference_evaluate(prompts, responses, mask)


def log_ratio(rollout: TokenPolicy, batch: Trajectories) -> NoReturn:
    """Raise MarlRayError, because sequential updates need agents that act at the same time.

    The agents of a copy of language models take turns.
    """
    raise MarlRayError("algorithm: sequential updates train actor-critics, not language models")
