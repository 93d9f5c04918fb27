"""Small language models and made-up responses.

They have a module of their own so that other processes can import it.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.policies.language.lora import add_adapters
from marl_ray.policies.language.sampling_copy import plain_copy, refresh
from marl_ray.policies.language.sharding.gather_shards import full_tensors, gather_to_rank0
from marl_ray.policies.language.sharding.shard import shard
from marl_ray.policies.language.tiny_models import byte_tokenizer
from marl_ray.policies.language.token_policy import TokenOutputs, TokenPolicy, build_token_policy
from marl_ray.training.collectives import worker_mesh
from marl_ray.training.learner.optimizers import clip_gradients

LORA = {"rank": 4, "alpha": 8.0}


def tiny(critic: bool = True, signals: int = 2, temperature: float = 0.7, **model: Any) -> TokenPolicy:
    """The smallest preset, with weights large enough that its distributions are far from uniform."""
    config = ModelConfig.model_validate({"preset": "tiny-0.2m", "context": 64} | model)
    policy = build_token_policy(config, GenerationConfig(temperature=temperature), 0, critic, signals)
    return add_noise(policy)


def add_noise(policy: TokenPolicy) -> TokenPolicy:
    """Add noise to all weights of a policy, adapters and heads included, and return it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def responses(rows: int = 4, vocabulary: int = 259, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts (R, 7), responses (R, 6) and mask; the first row has no response."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (rows, 1), generator=generator)
    prompts = torch.randint(0, vocabulary, (rows, 7), generator=generator)
    prompts = torch.where(torch.arange(7) >= 7 - lengths, prompts, -1)
    mask = torch.arange(6) < torch.randint(1, 7, (rows, 1), generator=generator)
    mask[:1] = False
    return prompts, torch.randint(0, vocabulary, (rows, 6), generator=generator) * mask, mask


def of_two_shards() -> None:
    """Run one of two workers, whose sharded policies must do what a plain one does on all rows."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    odd = [torch.randn(1), torch.randn(3, 5), torch.randn(7).bfloat16(), torch.randn(2, 3, 1), torch.randn(5).double()]
    sharded: list[Tensor] = [distribute_tensor(tensor.clone(), mesh, [Shard(0)], src_data_rank=None) for tensor in odd]
    sharded.insert(2, odd[0])  # one that every worker has whole
    for first, other in zip(full_tensors(sharded), [*odd[:2], odd[0], *odd[2:]], strict=True):
        assert first.dtype == other.dtype and torch.equal(first, other)
    models: list[dict[str, Any]] = [{}, {"activation_checkpointing": True, "lora": LORA}]
    for model in models:
        policy, complete = tiny(**model), tiny(**model)
        plain = plain_copy(policy)
        shard(policy, mesh, False)
        own_rows = responses(5 * rank, seed=rank)  # worker 0 has no rows
        got = policy.evaluate(*own_rows)
        everything = responses(5, seed=1)
        expected = complete.evaluate(*everything)
        if rank == 1:
            torch.testing.assert_close(got.log_probs, expected.log_probs, atol=1e-5, rtol=0)
        _loss(got).backward()
        (_loss(expected) / 2).backward()  # FSDP2 takes the mean over workers
        for (name, first), other in zip(policy.named_parameters(), complete.parameters(), strict=True):
            assert (first.grad is None) == (other.grad is None), name
            if first.grad is not None and other.grad is not None:
                torch.testing.assert_close(next(full_tensors([first.grad])), other.grad, atol=1e-5, rtol=1e-4, msg=name)
        with torch.no_grad():
            for first, other in zip(policy.actor_parameters(), complete.actor_parameters(), strict=True):
                assert first.grad is not None
                first.add_(first.grad, alpha=0.1)
                other.add_(next(full_tensors([first.grad])), alpha=0.1)
        refresh(plain, policy)
        for (name, first), other in zip(plain.named_parameters(), plain_copy(complete).parameters(), strict=True):
            assert torch.equal(first, other), name
    mixed = tiny(lora=LORA)
    exact = mixed.evaluate(*responses()).log_probs
    shard(mixed, mesh, True)
    torch.testing.assert_close(mixed.evaluate(*responses()).log_probs, exact, atol=0.1, rtol=0.05)


def of_joint_workers(context: int, tensor: int, model: dict[str, Any], biased: bool) -> None:
    """Run one of several workers that compute passes together as a plain policy does.

    Their policies must do what a plain one does on all rows. Worker 0 brings none. The model has 4 heads and 2 of keys:
    a Qwen2, or a Llama with a bias of every layer.
    """
    rank, count = dist.get_rank(), dist.get_world_size()
    policy, complete = _of_four_heads(model, biased), _of_four_heads(model, biased)
    plain = plain_copy(policy)
    shard(policy, worker_mesh("cpu", 1, context, tensor), False)
    assert policy.joint is not None and policy.joint.count == context * tensor
    every = [responses(3 * number, seed=number) for number in range(count)]
    got = policy.evaluate(*every[rank])
    expected = [complete.evaluate(*rows) for rows in every]
    for first, other in zip(vars(got).values(), vars(expected[rank]).values(), strict=True):
        torch.testing.assert_close(first, other, atol=1e-5, rtol=0)
    _loss(got).backward()
    (torch.stack([_loss(each) for each in expected]).sum() / count).backward()  # FSDP2 takes the mean over workers
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    norm = clip_gradients([policy], 1e9)
    gradients = list(full_tensors(parameter.grad for parameter in trained if parameter.grad is not None))
    pairs = [(name, parameter) for name, parameter in complete.named_parameters() if parameter.requires_grad]
    for (name, other), gradient in zip(pairs, gradients, strict=True):
        torch.testing.assert_close(gradient, other.grad, atol=1e-5, rtol=1e-4, msg=name)
    assert float(norm) == pytest.approx(
        float(torch.cat([gradient.flatten() for gradient in gradients]).norm()), rel=1e-5
    )
    refresh(plain, policy)
    for (name, first), other in zip(plain.named_parameters(), plain_copy(complete).parameters(), strict=True):
        assert torch.equal(first, other), name
    for (name, first), other in zip(policy.named_parameters(), complete.parameters(), strict=True):
        sent = gather_to_rank0(first.detach(), dist.group.WORLD)
        assert sent is None if rank else sent is not None and torch.equal(sent, other), name
    nothing = responses(0)
    assert policy.evaluate(*nothing).log_probs.shape == nothing[2].shape


def _of_four_heads(model: dict[str, Any], biased: bool) -> TokenPolicy:
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(64)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    more: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "bos_token_id": None}
    lm: Any = LlamaForCausalLM(LlamaConfig(**sizes, **more)) if biased else Qwen2ForCausalLM(Qwen2Config(**sizes))
    config = ModelConfig.model_validate({"preset": "tiny-0.2m", "context": 64} | model)
    if config.lora is not None:
        add_adapters(lm, config.lora)
    return add_noise(TokenPolicy(lm, tokenizer, config, GenerationConfig(temperature=0.7), True, 2))


def _loss(outputs: TokenOutputs) -> Tensor:
    assert outputs.values is not None and outputs.cost_values is not None
    parts = [outputs.log_probs, 0.1 * outputs.entropy, outputs.values, outputs.cost_values]
    return torch.stack([part.sum() for part in parts]).sum()
