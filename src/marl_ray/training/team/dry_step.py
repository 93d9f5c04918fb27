"""The memory of one training step of a language model on many GPUs, computed without a GPU: its tensors have no numbers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.language.model_files import empty_lm, tied_names
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenPolicy, shard


def dry_step(
    architecture: PretrainedConfig, model: ModelConfig, workers: int, rows: int, length: int, tokens: int
) -> dict[str, int]:
    """Bytes of each kind (such as SHARDED_PARAM, OPT), and their `Total`, when one of `workers` holds most in its second
    step of AdamW in bfloat16.

    A pass has `rows` sequences of `length` tokens, the last `tokens` of which are trained. The copy that samples is not
    counted, nor fragmentation, nor what CUDA's kernels take. Adapters and responses that share a prompt are not known
    here. It starts a process group of its own, so the process must have none; torch's fake groups exchange nothing.
    """
    dist.init_process_group("fake", rank=0, world_size=workers, store=FakeStore())
    try:
        lm = empty_lm(architecture)
        policy = TokenPolicy(lm, byte_tokenizer(model.context), model, GenerationConfig(max_tokens=tokens))
        shard(policy, init_device_mesh("cpu", (workers,)), mixed_precision=True)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _fill(lm)
            return _two_steps(policy, rows, length, tokens)
    finally:
        dist.destroy_process_group()


def _fill(lm: Any) -> None:
    """Give weights on the meta device fake ones of the CPU, and each tied weight one for all its names."""
    state: dict[str, nn.Parameter] = {}
    for tied in tied_names(lm):
        state |= dict.fromkeys(tied, nn.Parameter(torch.empty_like(lm.get_parameter(tied[0]), device="cpu")))
    lm.load_state_dict(state, strict=False, assign=True)
    for module in lm.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer))


def _two_steps(policy: TokenPolicy, rows: int, length: int, tokens: int) -> dict[str, int]:
    optimizer = torch.optim.AdamW(policy.actor_parameters(), 1e-5)
    ids = torch.zeros(rows, length, dtype=torch.int64)
    places = torch.arange(rows * length).view(rows, length)[:, -tokens - 1 : -1].flatten()
    targets = torch.zeros_like(places)
    tracker: Any = FSDPMemTracker(policy, optimizer)
    tracker.track_inputs((ids, places, targets))
    with tracker:
        for step in range(2):  # the first makes Adam's moments
            if step:
                tracker.reset_mod_stats()
            log_probs, *_ = policy(ids, places, targets, True, False)
            log_probs.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (kinds,) = tracker.get_tracker_snapshot("peak").values()
    return {str(kind).rpartition(".")[2]: number for kind, number in kinds.items()}
