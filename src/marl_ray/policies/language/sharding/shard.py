"""Shard the weights of a language model over a mesh of workers."""

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from marl_ray.policies.language.sharding.joint_pass import JointWorkers
from marl_ray.policies.language.sharding.tensor_parallel import decoder_layers, divide_layers
from marl_ray.policies.language.token_policy import Sharding, TokenPolicy, read_weights

MAX_GATHERED_ONCE_BYTES = 2 << 30
"""Maximum size of a model that stays gathered over the passes of a gradient step wherever it trains.

The size is in bytes of the type that passes compute with. Larger models are gathered block by block, twice in each
pass, unless workers on GPUs measure that there is room for them (`measure_pass_limits`).
"""


def shard(policy: TokenPolicy, mesh: DeviceMesh, mixed_precision: bool) -> None:
    """Shard the weights over the mesh's workers (FSDP2), block by block; every worker takes part.

    Of weights that are still in files each worker reads its shards alone. A block's weights are gathered for its
    forward pass, and again for its backward pass. Gradients are summed in float32. On a mesh of CPUs
    `config.cpu_offload` moves nothing, but takes the same way. On a mesh with dimensions `context` and `tensor` workers
    compute passes together (see `joint_pass`).
    """
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed_precision else MixedPrecisionPolicy()
    offload = policy.config.cpu_offload
    options: dict[str, Any] = {
        "mp_policy": mixed,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
        # The root module's weights are released too. If a pass without gradients left them gathered, they would be
        # stale after the next step.
        "reshard_after_forward": True,
    }
    if mixed_precision:  # frozen weights take no updates, so they need no more digits than the computation
        for parameter in policy.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    gathered_bytes = numbers * (2 if mixed_precision else 4)
    joint: JointWorkers | None = None
    for_layers = for_all = mesh
    if "tensor" in (mesh.mesh_dim_names or ()):
        together = mesh["context", "tensor"]._flatten("together")
        joint = JointWorkers(mesh["context"], mesh["tensor"], together.get_group())
        for_layers = _sharding_mesh(mesh, "shard", "context")
        for_all = _sharding_mesh(mesh, "shard", "context", "tensor")
        if mesh["tensor"].size() > 1:
            divide_layers(policy.lm, mesh["tensor"])
    policy.sharded = Sharding(joint, gathered_bytes, gathers_once=gathered_bytes <= MAX_GATHERED_ONCE_BYTES)
    for layer in decoder_layers(policy.lm):
        if policy.config.activation_checkpointing:
            # transformers' own checkpointing works in training mode only. No random numbers are drawn here.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(layer, mesh=for_layers, **options)
    # Embeddings and heads are not divided, so all workers that compute together hold a share of them.
    fully_shard(policy, mesh=for_all, **options)
    read_weights(policy, torch.device("cpu" if offload else mesh.device_type))


def _sharding_mesh(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Return the mesh over which FSDP2 shards weights: the named dimensions as one, and `replicate` before it."""
    flat = mesh[names]._flatten("_".join(names))
    return DeviceMesh._concatenate([mesh["replicate"], flat]) if mesh["replicate"].size() > 1 else flat
