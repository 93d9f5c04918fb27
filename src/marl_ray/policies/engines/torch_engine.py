"""The engine `torch`: the product's own batched decoding."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from marl_ray.config.run.engines import ENGINES
from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.engines.base import Completion, Engine, Prompt, Token, checked_generation
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.engines.models.cached_forward import CachedModel, ForwardModel
from marl_ray.policies.engines.models.llama import LlamaModel, is_llama
from marl_ray.policies.engines.serving import ServedEngine

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

CACHE_BYTES = 1 << 30
"""Memory for keys and values on a CPU, in bytes; on a GPU it is half of the free memory."""


class TorchEngine(Engine):
    """Decodes as many responses at once as the cache's memory allows. Further responses begin as others end."""

    spec = ENGINES["torch"]

    def __init__(self, policy: "TokenPolicy") -> None:
        self._policy = policy
        self._shape = make_cached_model(policy).shape

    def decoder(self, rows: int = 1) -> Decoder:
        """Make an empty decoder with room for `rows` rows at first, for callers whose prompts come and go."""
        # The model is read again, because its parameters may have been replaced.
        return Decoder(make_cached_model(self._policy), self._policy.tokenizer, self._policy.end_tokens, rows)

    @override
    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        generation = checked_generation(self._policy, prompts, generation)
        if not prompts:
            return []
        tokens = max(len(prompt.ids) for prompt in prompts) + generation.max_tokens
        limit = min(len(prompts), self._rows_at_once(tokens))
        decoder = self.decoder(limit)
        begun = 0
        ids: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        while True:
            free = limit - len(decoder)
            # Responses are added by quarters, because each addition takes a pass over prompts.
            if begun < len(prompts) and 4 * free >= limit:
                begun += len(decoder.add(prompts[begun : begun + free], seed, generation))
            if not len(decoder):
                version = self._policy.version
                return [Completion(*parts, version) for parts in zip(ids, log_probs, ended, strict=True)]
            for token in decoder.step():
                ids[token.handle].append(token.id)
                log_probs[token.handle].append(token.log_prob)
                ended[token.handle] = token.finish == "stop"

    @override
    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        generation = checked_generation(self._policy, [prompt], generation)
        decoder = self.decoder()
        decoder.add([prompt], seed, generation)
        while len(decoder):
            yield from decoder.step()

    def _rows_at_once(self, tokens: int) -> int:
        device = self._shape.device
        memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CACHE_BYTES
        return max(1, memory // (tokens * self._shape.bytes_per_token))


class ServedTorch(ServedEngine):
    """The built-in decoder for one policy of an arm."""

    takes_guides = True
    takes_biases = True

    def __init__(self, policy: "TokenPolicy") -> None:
        self._policy, self._model = policy, make_cached_model(policy)
        self.bytes_per_row = self._model.shape.bytes_per_token * policy.config.context
        self._decoder: Decoder | None = None

    @override
    def decoder(self) -> Decoder:
        if self._decoder is None:
            self._decoder = Decoder(self._model, self._policy.tokenizer, self._policy.end_tokens)
        return self._decoder

    @override
    def abandon(self) -> None:
        self._decoder = None

    @override
    def close(self) -> None:
        self._decoder = None


def make_cached_model(policy: "TokenPolicy") -> CachedModel:
    """Return the fastest way to run the policy's language model. Raises MarlRayError for one that cannot be decoded."""
    config = policy.config
    check_architecture(policy.lm.config, "torch", config.context, f"model.path {config.path!r}")
    if is_llama(policy.lm, policy.config.context):
        return LlamaModel(policy.lm, policy.config.context)
    return ForwardModel(policy.lm)
