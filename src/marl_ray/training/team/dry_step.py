"""Compute the memory of one training step of a language model on many GPUs, without a GPU.

The tensors of the step have no numbers.
"""

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.language.lora import add_adapters
from marl_ray.policies.language.model_files import empty_lm
from marl_ray.policies.language.packing import PackedSequences, pack
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy
from marl_ray.training.collectives import worker_mesh
from marl_ray.training.learner.families.language_policies import begin_pass, joint_workers


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
        """All bytes that the worker holds then."""
        return sum(self)


TRACKER_KINDS = {
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
    axes: tuple[int, int] = (1, 1),
) -> DryPeak:
    """Return the greatest memory of a worker in a step after the first.

    The worker is one of `shards` over which the weights are sharded. `axes` are the workers of them that share every
    sequence, and every layer, in a pass.

    The step is a pass of `size`, with gradients of a pass before it in memory, and a step of AdamW unless `optimizer`
    is False: plain gradient descent keeps nothing, and of an offloaded model the CPU takes the step. The copy that
    samples is not counted, nor fragmentation, nor what CUDA's kernels take. Sequences share no prompt. The step starts
    a process group of its own, so the process must have none; torch's fake groups exchange nothing.
    """
    dist.init_process_group("fake", rank=0, world_size=shards, store=FakeStore())
    try:
        lm = empty_lm(architecture)
        with init_empty_weights(include_buffers=False):
            if model.lora is not None:
                add_adapters(lm, model.lora)
            # On a mesh of CPUs there is nothing to offload from.
            without_offload = model.model_copy(update={"cpu_offload": False})
            policy = TokenPolicy(
                lm, byte_tokenizer(model.context), without_offload, GenerationConfig(max_tokens=size.tokens)
            )
        shard(policy, worker_mesh("cpu", 1, *axes), mixed_precision)
        sequences = _packed_pass(policy, size, axes[0]) if axes[0] > 1 else None
        with FakeTensorMode(allow_non_fake_inputs=True):
            _fill_weights(policy)
            return _measure_step(policy, size, optimizer, sequences)
    finally:
        dist.destroy_process_group()


def _fill_weights(policy: TokenPolicy) -> None:
    """Give weights on the meta device fake ones of the CPU, and each tied weight one for all its names."""
    fakes: dict[int, nn.Parameter] = {}
    state: dict[str, nn.Parameter] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if id(parameter) not in fakes:
            fakes[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        state[name] = fakes[id(parameter)]
    policy.load_state_dict(state, strict=False, assign=True)
    for module in policy.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer))


def _packed_pass(policy: TokenPolicy, size: DryPass, parts: int) -> PackedSequences:
    """Return the sequences of a pass, packed: what several workers can share a part each of."""
    prompts = torch.zeros(size.rows, max(1, policy.config.context - size.tokens), dtype=torch.int64)
    prompts[:, 0] = torch.arange(size.rows)  # none is shared
    responses = torch.zeros(size.rows, size.tokens, dtype=torch.int64)
    return pack(prompts, responses, torch.ones_like(responses, dtype=torch.bool), parts)[0]


def _measure_step(policy: TokenPolicy, size: DryPass, has_step: bool, sequences: PackedSequences | None) -> DryPeak:
    """Make a pass, and where it `has_step` a step of AdamW, and return the peak of the memory."""
    length = policy.config.context
    trained = policy.actor_parameters()
    optimizer = torch.optim.AdamW(trained, 1e-5, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    if has_step:
        optimizer.step()  # makes Adam's moments
    ids: Any = torch.zeros(size.rows, length, dtype=torch.int64) if sequences is None else sequences
    scorers = joint_workers(policy)
    # Which places they are does not matter to memory.
    targets = places = torch.zeros(-(-size.rows * size.tokens // scorers), dtype=torch.int64)
    assert policy.sharded is not None
    # The first of several passes holds most if the weights stay gathered from it on, else the last does.
    begin_pass(policy, last=not policy.sharded.gathers_once)
    tracker: Any = FSDPMemTracker(policy, optimizer)
    tracker.track_inputs((ids, places))
    with tracker, warnings.catch_warnings():
        # Adapters compare these pointers.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        log_probs, entropy, *_ = policy(ids, places, targets, True, size.learn_entropy)
        (log_probs + entropy).sum().backward()
        if has_step:
            optimizer.step()
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    numbers = {str(kind).rpartition(".")[2]: number for kind, number in kinds.items()}
    return DryPeak(**{field: sum(numbers[kind] for kind in named) for field, named in TRACKER_KINDS.items()})
