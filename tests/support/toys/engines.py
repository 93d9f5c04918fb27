"""Engines with weights of their own, and with specs of their own."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from marl_ray.config.run.engines import EngineSpec
from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.engines.base import Completion, Engine, Prompt, Token
from marl_ray.policies.engines.host import EngineHost, HostTransfer, PackedTensor, unpack_tensor
from marl_ray.policies.engines.torch_engine import ServedTorch, TorchEngine
from marl_ray.policies.language.lora import bare_name
from marl_ray.policies.language.sampling_copy import detach_copy, fill_with_zeros, sampling_weights
from marl_ray.policies.language.token_policy import TokenPolicy


class Apart(Engine):
    """Samples as the built-in engine does, by a whole model of its own.

    The model gets the weights one by one. It stands for an engine in another process.
    """

    @staticmethod
    def has_weights(generation: GenerationConfig) -> bool:
        return True

    def __init__(self, policy: TokenPolicy) -> None:
        assert all(parameter.is_meta for name, parameter in policy.lm.named_parameters() if ".lora_" not in name)
        self.policy, self.copy = policy, detach_copy(policy)
        fill_with_zeros(self.copy)
        self.copy.version = -1

    @torch.no_grad()
    def update_weights(self) -> None:
        if self.copy.version == self.policy.version:
            return
        targets = {
            bare_name(name): parameter for name, parameter in self.copy.lm.named_parameters(remove_duplicate=False)
        }
        for name, value in sampling_weights(self.policy):
            targets[name].copy_(value)
        for name, value in self.policy.lm.named_parameters():
            if not value.is_meta:  # of an adapter
                targets[name].copy_(value)
        self.copy.version = self.policy.version

    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        return TorchEngine(self.copy).generate(prompts, seed, generation)

    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        return TorchEngine(self.copy).stream(prompt, seed, generation)


class Plain(TorchEngine):
    """Decodes as the built-in engine does. Its spec lets it serve and run in actors, with small adapters alone."""

    spec = EngineSpec(
        architectures="decoded",
        start_s=50,
        max_rank=8,
        host="toys.engines:PlainHost",
        server="toys.engines:ServedPlain",
    )


class PlainHost(EngineHost):
    """Decodes in an actor as the built-in engine does in the worker."""

    def __init__(self, policy: TokenPolicy, tensor_parallel: int, memory_share: float, transfer: HostTransfer) -> None:
        assert transfer is HostTransfer.OBJECT_STORE
        self.policy, self.tokens = policy, 0

    @torch.no_grad()
    def load(self, version: int, weights: Mapping[str, PackedTensor], complete: bool = True) -> None:
        assert version > self.policy.version
        parameters = dict(self.policy.lm.named_parameters())
        for name, value in weights.items():
            parameters[name].copy_(unpack_tensor(value))
        if complete:
            self.policy.version = version

    def generate(
        self, version: int, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig
    ) -> list[Completion]:
        assert version == self.policy.version
        written = TorchEngine(self.policy).generate(prompts, seed, generation)
        self.tokens += sum(len(completion.ids) for completion in written)
        return written

    def progress(self) -> int:
        return self.tokens


class ServedPlain(ServedTorch):
    """Writes an arm's responses as the built-in decoder does, but takes neither guides nor biases."""

    takes_guides = False
    takes_biases = False
