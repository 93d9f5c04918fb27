"""vLLM (`marl-ray[vllm]`) in a process of its own, whose weights follow the policy's."""

import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Completion, Engine, Prompt, Token, check_prompts, tokens_of
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.engines.vllm_process.decoder import VllmDecoder
from marl_ray.policies.engines.vllm_process.messages import VllmSettings
from marl_ray.policies.engines.vllm_process.process import EngineLost, VllmProcess
from marl_ray.policies.engines.vllm_process.shared_weights import SharedWeights
from marl_ray.policies.language.lora import bare_weights, save_adapters
from marl_ray.policies.language.padding import padded

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

BESIDE = 0.5
"""Share of the memory of a GPU that vLLM has beside a worker's model."""
SCORED = 16
"""Responses that are scored together."""


class VllmEngine(Engine):
    """vLLM on the policy's weights: before it samples, weights that have changed are handed over.

    Each response has a random generator of its own, seeded from (seed, stream): it does not depend on the batch, but it is
    not the response that the torch engine gives. Log-probabilities are vLLM's own, where it has those of the whole
    distribution at the generation's temperature; else the policy's, from a full pass.

    A process that dies or falls silent is replaced once in a call, and all its responses are written again.
    """

    def __init__(
        self,
        policy: "TokenPolicy",
        processed: bool | None = None,
        tensor_parallel: int = 1,
        memory_share: float = BESIDE,
    ) -> None:
        """`processed`: vLLM reports log-probabilities after temperature, top-k and top-p, and not the model's own; when
        not given, where the policy's temperature is not 1. `memory_share`: share of a GPU's memory that vLLM takes. Raises
        MarlRayError without the package, or for an architecture that it is not trusted with."""
        if find_spec("vllm") is None:
            raise MarlRayError("generation.engine=vllm: expected the package vllm (marl-ray[vllm])")
        config = policy.config
        check_architecture(policy.lm.config, "vllm", config.context, f"model.path {config.path!r}")
        self._policy = policy
        self._processed = policy.generation.temperature != 1 if processed is None else processed
        self._weights = SharedWeights(bare_weights(policy.lm))
        self._folder = tempfile.TemporaryDirectory(prefix="marl-ray-vllm-")
        policy.lm.config.save_pretrained(self._folder.name)
        self._process: VllmProcess | None = None
        self._tensor_parallel, self._memory_share = tensor_parallel, memory_share
        self._version = 0
        """The version of the weights that the process has; counts every hand-over."""
        self._held: Any = None
        """The state of the policy's weights when they were handed over."""

    @property
    def process(self) -> VllmProcess | None:
        """The process, once there is one."""
        return self._process

    def close(self) -> None:
        """End the process; the next call starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def decoder(self) -> VllmDecoder:
        """An empty decoder on the policy's weights as they are now; while one writes, they must stay so."""
        process, policy = self._follow(), self._policy
        adapter = self._version if policy.config.lora is not None else 0
        return VllmDecoder(process, policy.tokenizer, policy.end_tokens, self._version, adapter)

    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        generation = generation or self._policy.generation
        check_prompts(prompts, generation, self._policy.config.context)
        if not prompts:
            return []
        try:
            ids, log_probs, ended = self._generate(prompts, seed, generation)
        except EngineLost:
            ids, log_probs, ended = self._generate(prompts, seed, generation)
        return self.completions(prompts, generation, ids, log_probs, ended)

    def completions(
        self,
        prompts: Sequence[Prompt],
        generation: GenerationConfig,
        ids: Sequence[list[int]],
        log_probs: Sequence[list[float]],
        ended: Sequence[bool],
    ) -> list[Completion]:
        """Responses that the decoder has written, with the log-probabilities that are trained on."""
        if not self._exact(generation):
            log_probs = [
                score
                for start in range(0, len(prompts), SCORED)
                for score in self._score(prompts[start : start + SCORED], ids[start : start + SCORED])
            ]
        version = self._policy.version
        return [Completion(*parts, version) for parts in zip(ids, log_probs, ended, strict=True)]

    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        """All tokens at once, when the last one is there."""
        [completion] = self.generate([prompt], seed, generation)
        yield from tokens_of(completion)

    def _generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig
    ) -> tuple[list[list[int]], list[list[float]], list[bool]]:
        ids: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        try:
            decoder = self.decoder()
            rows = {handle: row for row, handle in enumerate(decoder.add(prompts, seed, generation))}
            while len(decoder):
                for token in decoder.step():
                    row = rows[token.handle]
                    ids[row].append(token.id)
                    log_probs[row].append(token.log_prob)
                    ended[row] = token.finish == "stop"
        except BaseException:
            self.close()  # responses that nobody waits for would be written on
            raise
        return ids, log_probs, ended

    def _exact(self, generation: GenerationConfig) -> bool:
        """True if vLLM's log-probabilities are those of the whole distribution at the generation's temperature."""
        if not self._processed:
            return generation.temperature == 1
        return generation.top_k == 0 and generation.top_p == 1

    def _follow(self) -> VllmProcess:
        """The process, with the policy's weights as they are now."""
        if self._process is None or self._process.lost:
            self._process, self._held = VllmProcess(self._settings(), torch.get_num_threads()), None
        state = _state(self._policy)
        if self._held == state:
            return self._process
        version, adapted = self._version + 1, self._policy.config.lora is not None
        if self._held is None or not adapted:
            self._weights.write(version, bare_weights(self._policy.lm))
            self._process.ask("load", version, self._weights.layout)
        if adapted:
            if self._held is not None:
                self._process.ask("drop_adapter", self._version)
            with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
                assert self._policy.config.lora is not None
                save_adapters(self._policy.lm, self._policy.config.lora, None, Path(folder))
                self._process.ask("load_adapter", version, folder)
        self._version, self._held = version, state
        return self._process

    def _settings(self) -> VllmSettings:
        policy = self._policy
        return VllmSettings(
            self._folder.name,
            str(policy.lm.dtype).removeprefix("torch."),
            policy.config.context,
            self._processed,
            policy.config.lora.rank if policy.config.lora is not None else 0,
            self._tensor_parallel,
            self._memory_share,
        )

    @torch.no_grad()
    def _score(self, prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> list[list[float]]:
        rows = padded([prompt.ids for prompt in prompts], responses)
        ids, answers, mask = (x.to(self._policy.device) for x in rows)
        scores: Tensor = self._policy.evaluate(ids, answers, mask, need_entropy=False).log_probs
        return [row[: len(response)] for row, response in zip(scores.tolist(), responses, strict=True)]


def _state(policy: "TokenPolicy") -> list[tuple[int, int]]:
    """Changes with every write to the weights."""
    return [(parameter.data_ptr(), parameter._version) for parameter in policy.lm.parameters()]
