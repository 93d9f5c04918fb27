"""The memory of one training step of a language model on many GPUs, computed without a GPU: its tensors have no numbers."""

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.language.lora import add_adapters
from marl_ray.policies.language.model_files import empty_lm
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.token_policy import TokenPolicy


class DryPass(NamedTuple):
    """The size of a forward and backward pass of one worker."""

    rows: int
    """Sequences, each as long as the model's context."""
    tokens: int
    """Tokens at the end of each sequence that are trained."""
    learn_entropy: bool = False
    """The loss contains the entropy."""


class DryPeak(NamedTuple):
    """Bytes of one worker's memory when it holds most of it in a step."""

    weights: int
    """The worker's shards of the weights."""
    gradients: int
    """The worker's shards of the gradients of an earlier pass."""
    optimizer: int
    """The two moments of AdamW for these shards."""
    gathered: int
    """Weights of one block and of embeddings, complete, and the buffers by which they and gradients are exchanged."""
    activations: int
    """All else: what the passes keep, and what they compute with."""

    @property
    def total(self) -> int:
        return sum(self)


KINDS = {
    "weights": ("SHARDED_PARAM",),
    "gradients": ("SHARDED_GRAD",),
    "optimizer": ("OPT",),
    "gathered": ("UNSHARDED_PARAM", "UNSHARDED_GRAD", "ALL_GATHER", "REDUCE_SCATTER"),
    "activations": ("ACT", "TEMP", "INP", "BUFFER"),
}
"""Field of `DryPeak` -> the kinds of torch's tracker that it is the sum of."""


def dry_step(
    architecture: PretrainedConfig,
    model: ModelConfig,
    shards: int,
    size: DryPass,
    mixed_precision: bool = True,
    optimizer: bool = True,
) -> DryPeak:
    """The greatest memory of a worker, one of `shards` over which the weights are spread, in a step after the first.

    The step is a pass of `size`, with gradients of a pass before it in memory, and a step of AdamW unless `optimizer` is
    False. The copy that samples is not counted, nor fragmentation, nor what CUDA's kernels take. Sequences share no
    prompt. It starts a process group of its own, so the process must have none; torch's fake groups exchange nothing.
    """
    dist.init_process_group("fake", rank=0, world_size=shards, store=FakeStore())
    try:
        lm = empty_lm(architecture)
        with init_empty_weights(include_buffers=False):
            if model.lora is not None:
                add_adapters(lm, model.lora)
            # On a mesh of CPUs there is nothing to offload from.
            own = model.model_copy(update={"cpu_offload": False})
            policy = TokenPolicy(lm, byte_tokenizer(model.context), own, GenerationConfig(max_tokens=size.tokens))
        shard(policy, init_device_mesh("cpu", (shards,)), mixed_precision)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _fill(policy)
            return _step(policy, size, optimizer)
    finally:
        dist.destroy_process_group()


def _fill(policy: TokenPolicy) -> None:
    """Give weights on the meta device fake ones of the CPU, and each tied weight one for all its names."""
    fakes: dict[int, nn.Parameter] = {}
    state: dict[str, nn.Parameter] = {}
    for name, own in policy.named_parameters(remove_duplicate=False):
        if id(own) not in fakes:
            fakes[id(own)] = nn.Parameter(torch.empty_like(own, device="cpu"), own.requires_grad)
        state[name] = fakes[id(own)]
    policy.load_state_dict(state, strict=False, assign=True)
    for module in policy.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer))


def _step(policy: TokenPolicy, size: DryPass, steps: bool) -> DryPeak:
    length = policy.config.context
    trained = policy.actor_parameters()
    optimizer = torch.optim.AdamW(trained, 1e-5, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    if steps:
        optimizer.step()  # makes Adam's moments
    ids = torch.zeros(size.rows, length, dtype=torch.int64)
    places = torch.arange(size.rows * length).view(size.rows, length)[:, -size.tokens - 1 : -1].flatten()
    targets = torch.zeros_like(places)
    tracker: Any = FSDPMemTracker(policy, optimizer)
    tracker.track_inputs((ids, places, targets))
    with tracker, warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Accessing the data pointer of FakeTensor", UserWarning
        )  # adapters compare them
        log_probs, entropy, *_ = policy(ids, places, targets, True, size.learn_entropy)
        (log_probs + entropy).sum().backward()
        if steps:
            optimizer.step()
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    numbers = {str(kind).rpartition(".")[2]: number for kind, number in kinds.items()}
    return DryPeak(**{field: sum(numbers[kind] for kind in named) for field, named in KINDS.items()})
