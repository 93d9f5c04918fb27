"""The engine `transformers`, which samples by transformers' continuous batching.

With its paged cache it reads prompts while it writes other responses.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, LogitsProcessorList
from transformers import GenerationConfig as TransformersGeneration
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import FutureRequestState
from typing_extensions import override

from marl_ray.config.run.engines import ENGINES
from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Completion, Engine, Prompt, Token, checked_generation
from marl_ray.policies.engines.decoding.sampling import draw
from marl_ray.policies.engines.decoding.stop_strings import first_stop
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.engines.torch_engine import CACHE_BYTES, TorchEngine
from marl_ray.policies.language import packing
from marl_ray.policies.language.philox import token_uniforms

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

PAGE_TOKENS = 32
"""Tokens per page of the cache on a CPU; on a GPU transformers chooses."""
SILENT_S = 300.0
"""Seconds without a finished response after which the engine counts as stuck."""


class _Draw(ContinuousBatchingLogitsProcessor):
    """Draws the tokens from our own random numbers by making all other tokens impossible.

    It keeps the tokens and their log-probabilities. The engine tells it the rows of the next logits right before
    passing the logits, which works only while batches are not prepared ahead (`use_async_batching`).
    """

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig) -> None:
        self._prompts, self._generation = prompts, generation
        self._uniforms = token_uniforms(seed, [prompt.stream for prompt in prompts], generation.max_tokens)
        self._rows: list[int] = []
        self.ids: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[list[float]] = [[] for _ in prompts]

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Fill the argument of a step that draws nothing."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """Keep the responses that get a token in this step, and return their numbers, int32."""
        self._rows = [int(request.state.request_id) for request in requests_with_new_token]
        return torch.tensor(self._rows, dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Any:
        uniforms = np.array([self._uniforms[row, len(self.ids[row])] for row in self._rows])
        flags = [self._prompts[row].greedy for row in self._rows]
        config, device = self._generation, scores.device
        # A prompt of which only a part fits into a step has a row too, after the rows that get a token; its logits are
        # unused.
        tokens, log_probs = draw(
            scores[: len(self._rows)],
            torch.from_numpy(uniforms).to(device),
            torch.tensor(flags, device=device) if any(flags) else None,
            config.temperature,
            config.top_k,
            config.top_p,
        )
        for row, token, log_prob in zip(self._rows, tokens.tolist(), log_probs.tolist(), strict=True):
            self.ids[row].append(token)
            self.log_probs[row].append(log_prob)
        token_column = torch.zeros(len(scores), 1, dtype=torch.int64, device=device)
        token_column[: len(tokens), 0] = tokens
        return torch.full_like(scores, -torch.inf).scatter(1, token_column, 0.0)


class PagedEngine(Engine):
    """Writes the same tokens as the torch engine. A response is shortened to its stop string after it is complete.

    Raises MarlRayError for a model without continuous batching.
    """

    spec = ENGINES["transformers"]

    def __init__(self, policy: "TokenPolicy") -> None:
        self._policy, config = policy, policy.config
        check_architecture(policy.lm.config, "transformers", config.context, f"model.path {config.path!r}")
        if not hasattr(policy.lm, "init_continuous_batching"):
            raise MarlRayError("generation.engine=transformers: this model has no continuous batching; expected torch")

    @override
    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        generation = checked_generation(self._policy, prompts, generation)
        if not prompts:
            return []
        sampler = _Draw(prompts, seed, generation)
        with torch.inference_mode():
            self._run(prompts, generation, sampler)
        return [
            self._completion(ids, log_probs, generation)
            for ids, log_probs in zip(sampler.ids, sampler.log_probs, strict=True)
        ]

    @override
    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        # A single response gains nothing from continuous batching.
        return TorchEngine(self._policy).stream(prompt, seed, generation)

    def _run(self, prompts: Sequence[Prompt], generation: GenerationConfig, sampler: _Draw) -> None:
        if self._policy.packs:  # transformers pages the attention functions that it knows
            self._policy.lm.set_attn_implementation("sdpa")
        try:
            self._run_paged(prompts, generation, sampler)
        finally:
            if self._policy.packs:
                packing.use_packed_attention(self._policy.lm)

    def _run_paged(self, prompts: Sequence[Prompt], generation: GenerationConfig, sampler: _Draw) -> None:
        manager = self._manager(prompts, generation, sampler)
        manager.start()
        try:
            for number, prompt in enumerate(prompts):
                manager.add_request(list(prompt.ids), str(number), max_new_tokens=generation.max_tokens)
            waiting, last_answer_at = set(range(len(prompts))), time.monotonic()
            while waiting:
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise MarlRayError(
                            f"generation.engine=transformers: its thread ended before {len(waiting)} of {len(prompts)} "
                            "responses"
                        )
                    if time.monotonic() - last_answer_at > SILENT_S:
                        raise MarlRayError(f"generation.engine=transformers gave no response in {SILENT_S:g} s")
                    continue
                if result.error is not None:
                    raise MarlRayError(f"generation.engine=transformers: {result.error}")
                if result.is_finished():
                    number, last_answer_at = int(result.request_id), time.monotonic()
                    # The engine reads the prompt's ids and returns the drawn ids, without text in between.
                    ids = list(prompts[number].ids), sampler.ids[number]
                    if (result.prompt_ids, result.generated_tokens) != ids:
                        raise MarlRayError("generation.engine=transformers returned token ids that were not drawn")
                    waiting.discard(number)
        finally:
            manager.stop(block=True, timeout=SILENT_S)
            if not manager.is_running():  # else it would wait without a deadline for a thread that hangs
                manager.destroy()

    def _manager(
        self, prompts: Sequence[Prompt], generation: GenerationConfig, sampler: _Draw
    ) -> ContinuousBatchingManager:
        lm = self._policy.lm
        settings = TransformersGeneration(
            max_new_tokens=generation.max_tokens,
            do_sample=False,
            eos_token_id=sorted(self._policy.end_tokens),
            pad_token_id=self._policy.tokenizer.pad_token_id,
        )
        sizes: dict[str, Any] = {}
        if lm.device.type == "cpu":  # transformers does not measure its free memory
            config = lm.config.get_text_config()
            width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            page = PAGE_TOKENS * 2 * heads * width * config.num_hidden_layers * lm.dtype.itemsize
            needed = sum(-(-(len(prompt.ids) + generation.max_tokens) // PAGE_TOKENS) + 1 for prompt in prompts)
            sizes = {
                "page_size": PAGE_TOKENS,
                "num_blocks": min(needed, max(CACHE_BYTES // page, 1)),
                "max_batch_tokens": 2048,
            }
        batching = ContinuousBatchingConfig(
            use_async_batching=False, use_cuda_graph=False, auto_switch_to_flash=False, **sizes
        )
        manager: ContinuousBatchingManager = lm.init_continuous_batching(settings, batching)
        processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
        processors.tensors_required = 1
        manager.logit_processor = processors
        return manager

    def _completion(self, ids: list[int], log_probs: list[float], generation: GenerationConfig) -> Completion:
        """Return the response up to the end of its first stop string, or whole without one."""
        at = first_stop(self._policy.tokenizer, generation.stop, ids) if generation.stop else None
        length = len(ids) if at is None else at + 1
        ended = at is not None or ids[-1] in self._policy.end_tokens
        return Completion(ids[:length], log_probs[:length], ended, self._policy.version)
