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
from marl_ray.policies.engines.base import Completion, Prompt, Token, check_prompts
from marl_ray.policies.engines.decoding.stop_strings import StopStrings
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.engines.vllm_process.messages import Request, Sampled, Settings
from marl_ray.policies.engines.vllm_process.process import EngineLost, VllmProcess
from marl_ray.policies.engines.vllm_process.shared_weights import SharedWeights
from marl_ray.policies.language.lora import bare_weights, save_adapters
from marl_ray.policies.language.philox import token_uniforms

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

SCORED = 16
"""Responses that are scored together."""


class VllmEngine:
    """vLLM on the policy's weights: before it samples, weights that have changed are handed over.

    Each response has a random generator of its own, seeded from (seed, stream): it does not depend on the batch, but it is
    not the response that the torch engine gives. Log-probabilities are vLLM's own, where it has those of the whole
    distribution at the generation's temperature; else the policy's, from a full pass.

    A process that dies or falls silent is replaced once in a call, and all its responses are written again.
    """

    def __init__(self, policy: "TokenPolicy") -> None:
        if find_spec("vllm") is None:
            raise MarlRayError("generation.engine=vllm: expected the package vllm (marl-ray[vllm])")
        config = policy.config
        check_architecture(policy.lm.config, "vllm", config.context, f"model.path {config.path!r}")
        self._policy = policy
        self._processed = policy.generation.temperature != 1
        self._weights = SharedWeights(bare_weights(policy.lm))
        self._folder = tempfile.TemporaryDirectory(prefix="marl-ray-vllm-")
        policy.lm.config.save_pretrained(self._folder.name)
        self._process: VllmProcess | None = None
        self._version = 0
        """Of the weights that the process has; counts every hand-over."""
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

    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        generation = generation or self._policy.generation
        check_prompts(prompts, generation, self._policy.config.context)
        if not prompts:
            return []
        try:
            return self._generate(prompts, seed, generation)
        except EngineLost:
            self.close()
            return self._generate(prompts, seed, generation)

    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        """All tokens at once, when the last one is there."""
        [completion] = self.generate([prompt], seed, generation)
        last = len(completion.ids) - 1
        for place, (token, log_prob) in enumerate(zip(completion.ids, completion.log_probs, strict=True)):
            yield Token(0, token, log_prob, ("stop" if completion.ended else "length") if place == last else None)

    def _generate(self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig) -> list[Completion]:
        process = self._follow()
        ids: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        stops = StopStrings(self._policy.tokenizer, generation.stop) if generation.stop else None
        process.ask("add", self._requests(prompts, seed, generation))
        writing = set(range(len(prompts)))
        while writing:
            sampled: list[Sampled] = process.ask("step")
            done = []
            for token in sampled:
                if token.version != self._version:
                    raise EngineLost(
                        f"generation.engine=vllm: it samples with version {token.version} of the weights, expected "
                        f"{self._version}"
                    )
                ids[token.handle].append(token.id)
                log_probs[token.handle].append(token.log_prob)
            new = [token.handle for token in sampled]
            held = stops.completed([ids[row] for row in new]) if stops and new else [False] * len(new)
            for row, stopped in zip(new, held, strict=True):
                by_itself = ids[row][-1] in self._policy.end_tokens
                if stopped and not by_itself and len(ids[row]) < generation.max_tokens:
                    done.append(row)  # of the others vLLM itself knows that they are done
                ended[row] = stopped or by_itself
                if ended[row] or len(ids[row]) == generation.max_tokens:
                    writing.discard(row)
            if done:
                process.ask("remove", done)
        if not self._exact(generation):
            log_probs = [
                score
                for start in range(0, len(prompts), SCORED)
                for score in self._score(prompts[start : start + SCORED], ids[start : start + SCORED])
            ]
        version = self._policy.version
        return [Completion(*parts, version) for parts in zip(ids, log_probs, ended, strict=True)]

    def _requests(self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig) -> list[Request]:
        numbers = token_uniforms(seed, [prompt.stream for prompt in prompts], 1)[:, 0]
        return [
            Request(
                row,
                prompt.ids,
                0.0 if prompt.greedy else generation.temperature,
                generation.top_k,
                generation.top_p,
                generation.max_tokens,
                tuple(sorted(self._policy.end_tokens)),
                int(number * 2**52),
                self._version if self._policy.config.lora is not None else 0,
            )
            for row, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
        ]

    def _exact(self, generation: GenerationConfig) -> bool:
        """True if vLLM's log-probabilities are those of the whole distribution at the generation's temperature."""
        if not self._processed:
            return generation.temperature == 1
        return generation.top_k == 0 and generation.top_p == 1

    def _follow(self) -> VllmProcess:
        """The process, with the policy's weights as they are now."""
        if self._process is None:
            self._process, self._held = VllmProcess(self._settings(), torch.get_num_threads()), None
        state = _state(self._policy)
        if self._held == state:
            return self._process
        version, adapted = self._version + 1, self._policy.config.lora is not None
        if self._held is None or not adapted:
            self._weights.write(version, bare_weights(self._policy.lm))
            self._process.ask("load", version)
        if adapted:
            if self._held is not None:
                self._process.ask("drop_adapter", self._version)
            with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
                assert self._policy.config.lora is not None
                save_adapters(self._policy.lm, self._policy.config.lora, None, Path(folder))
                self._process.ask("load_adapter", version, folder)
        self._version, self._held = version, state
        return self._process

    def _settings(self) -> Settings:
        policy = self._policy
        return Settings(
            self._folder.name,
            str(policy.lm.dtype).removeprefix("torch."),
            policy.config.context,
            self._processed,
            self._weights.layout,
            policy.config.lora.rank if policy.config.lora is not None else 0,
        )

    @torch.no_grad()
    def _score(self, prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> list[list[float]]:
        before, after = max(len(prompt.ids) for prompt in prompts), max(map(len, responses))
        ids = torch.full((len(prompts), before), -1)
        answers = torch.zeros(len(prompts), after, dtype=torch.long)
        mask = torch.zeros(len(prompts), after, dtype=torch.bool)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            ids[row, before - len(prompt.ids) :] = torch.tensor(prompt.ids)
            answers[row, : len(response)] = torch.tensor(response)
            mask[row, : len(response)] = True
        device = self._policy.device
        scores: Tensor = self._policy.evaluate(
            ids.to(device), answers.to(device), mask.to(device), need_entropy=False
        ).log_probs
        return [row[: len(response)] for row, response in zip(scores.tolist(), responses, strict=True)]


def _state(policy: "TokenPolicy") -> list[tuple[int, int]]:
    """Changes with every write to the weights."""
    return [(parameter.data_ptr(), parameter._version) for parameter in policy.lm.parameters()]
