"""vLLM, where there is a GPU and the package (`marl-ray[vllm]`)."""

import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Completion, Prompt, Token, check_prompts
from marl_ray.policies.engines.decoding.stop_strings import first_stop
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.language.philox import token_uniforms

if TYPE_CHECKING:
    from marl_ray.policies.language.token_policy import TokenPolicy

MEMORY = 0.5
"""Share of the GPU's memory that vLLM may take; the policy itself scores the responses in the rest."""
SCORED = 16
"""Responses that are scored together."""


class VllmEngine:
    """vLLM on the weights as they are when the engine is made; it refuses to sample once they have changed.

    Each response has a random generator of its own, seeded from (seed, stream): it does not depend on the batch, but it is
    not the response that the torch engine gives. Log-probabilities are the policy's own, from a full pass, because vLLM's
    are of other distributions.
    """

    def __init__(self, policy: "TokenPolicy") -> None:
        if not torch.cuda.is_available() or find_spec("vllm") is None:
            raise MarlRayError("generation.engine=vllm: expected a GPU and the package vllm (marl-ray[vllm])")
        config = policy.config
        check_architecture(policy.lm.config, "vllm", config.context, f"model.path {config.path!r}")
        from vllm import LLM

        from marl_ray.policies.language.token_policy import save_merged

        self._policy = policy
        self._version = _version(policy)
        with tempfile.TemporaryDirectory(prefix="marl-ray-vllm-") as folder:
            save_merged(policy, folder)
            policy.tokenizer.save_pretrained(folder)
            self._llm = LLM(
                model=folder,
                dtype=str(policy.lm.dtype).removeprefix("torch."),
                max_model_len=policy.config.context,
                gpu_memory_utilization=MEMORY,
                enable_prefix_caching=True,
            )

    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        from vllm import SamplingParams

        generation = generation or self._policy.generation
        check_prompts(prompts, generation, self._policy.config.context)
        if _version(self._policy) != self._version:
            raise MarlRayError(
                "generation.engine=vllm cannot take new weights: expected torch or transformers to train"
            )
        if not prompts:
            return []
        numbers = token_uniforms(seed, [prompt.stream for prompt in prompts], 1)[:, 0]
        settings = [
            SamplingParams(
                temperature=0.0 if prompt.greedy else generation.temperature,
                top_k=generation.top_k or -1,
                top_p=generation.top_p,
                max_tokens=generation.max_tokens,
                stop=list(generation.stop),
                stop_token_ids=sorted(self._policy.end_tokens),
                skip_special_tokens=False,
                seed=int(number * 2**52),
            )
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        inputs = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts]
        outputs = self._llm.generate(inputs, settings, use_tqdm=False)
        # What was read is the prompt's ids, with no text between.
        assert [list(output.prompt_token_ids) for output in outputs] == [list(prompt.ids) for prompt in prompts]
        answers = [output.outputs[0] for output in outputs]
        ids = [list(answer.token_ids) for answer in answers]
        ended = [answer.finish_reason == "stop" for answer in answers]
        if generation.stop:  # vLLM looks for them in the text with its special tokens alone
            for row, own in enumerate(ids):
                at = first_stop(self._policy.tokenizer, generation.stop, own)
                if at is not None:
                    ids[row], ended[row] = own[: at + 1], True
        scores = [
            score
            for start in range(0, len(prompts), SCORED)
            for score in self._score(prompts[start : start + SCORED], ids[start : start + SCORED])
        ]
        return [Completion(own, score, by_itself) for own, score, by_itself in zip(ids, scores, ended, strict=True)]

    def stream(self, prompt: Prompt, seed: int, generation: GenerationConfig | None = None) -> Iterator[Token]:
        """All tokens at once, when the last one is there: log-probabilities are of the whole response."""
        [completion] = self.generate([prompt], seed, generation)
        last = len(completion.ids) - 1
        for place, (token, log_prob) in enumerate(zip(completion.ids, completion.log_probs, strict=True)):
            yield Token(0, token, log_prob, ("stop" if completion.ended else "length") if place == last else None)

    @torch.no_grad()
    def _score(self, prompts: Sequence[Prompt], responses: Sequence[list[int]]) -> list[list[float]]:
        before, after = max(len(prompt.ids) for prompt in prompts), max(map(len, responses))
        ids = torch.full((len(prompts), before), -1)
        answers, mask = (
            torch.zeros(len(prompts), after, dtype=torch.long),
            torch.zeros(len(prompts), after, dtype=torch.bool),
        )
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            ids[row, before - len(prompt.ids) :] = torch.tensor(prompt.ids)
            answers[row, : len(response)] = torch.tensor(response)
            mask[row, : len(response)] = True
        device = self._policy.device
        scores = self._policy.evaluate(
            ids.to(device), answers.to(device), mask.to(device), need_entropy=False
        ).log_probs
        return [row[: len(response)] for row, response in zip(scores.tolist(), responses, strict=True)]


def _version(policy: "TokenPolicy") -> Any:
    """Changes with every write to the weights."""
    return [(parameter.data_ptr(), parameter._version) for parameter in policy.lm.parameters()]
