"""The batch of one language model: the responses that it writes now, a row each, token by token."""

import contextlib
from collections.abc import Sequence

from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.torch_engine import cached_model
from marl_ray.policies.engines.vllm_process.decoder import VllmDecoder
from marl_ray.policies.engines.vllm_process.process import EngineLost
from marl_ray.policies.engines.vllm_shared import SharedVllm
from marl_ray.serving.arms.errors import NotFiniteError
from marl_ray.serving.arms.text.reply import Arrived, BatchedReply
from marl_ray.serving.arms.text.served_model import ServedModel


class TokenBatch:
    """The rows of one model; only the arm's thread touches them."""

    def __init__(self, model: ServedModel):
        """Load the engine. Raises MarlRayError for a model that cannot be decoded here."""
        self.model, policy = model, model.policy
        self._vllm = SharedVllm(policy) if model.engine == "vllm" else None
        self._cached = cached_model(policy) if self._vllm is None else None
        per_token = self._cached.shape.bytes_per_token if self._cached is not None else 0  # vLLM minds its own memory
        self.bytes_per_row: int = per_token * policy.config.context
        self.clear()
        self._begun()

    def clear(self) -> None:
        """Begin with an empty batch."""
        self._decoder: Decoder | None = None
        self.rows: dict[int, BatchedReply] = {}
        if self._vllm is not None:
            self._vllm.abandon()

    def close(self) -> None:
        """Leave the process of vLLM, where there is one."""
        if self._vllm is not None:
            self._vllm.close()

    def _begun(self) -> Decoder | VllmDecoder:
        """The batch's decoder. Raises MarlRayError where vLLM cannot start."""
        if self._vllm is not None:
            return self._vllm.decoder()
        if self._decoder is None:
            assert self._cached is not None
            self._decoder = Decoder(self._cached, self.model.tokenizer, self.model.policy.end_tokens)
        return self._decoder

    def add(self, new: Sequence[BatchedReply]) -> None:
        groups: dict[GenerationConfig, list[BatchedReply]] = {}
        for reply in new:
            groups.setdefault(reply.generation, []).append(reply)
        for generation, group in groups.items():
            # The request's seed is the stream of a common one, so that prompts can be read together.
            handles = self._begun().add([reply.prompt for reply in group], 0, generation)
            self.rows.update(zip(handles, group, strict=True))
            for reply in group:
                reply.joined = True

    def step(self, number: int) -> list[tuple[BatchedReply, Arrived]]:
        """Draw the next token of every row; a row with logits that are not finite gets its failure instead."""
        arrived: list[tuple[BatchedReply, Arrived]] = []
        not_finite: list[int] = []
        for token in self._begun().step(not_finite):
            arrived.append((self.rows[token.handle], token))
            if token.finish is not None:
                del self.rows[token.handle]
        for handle in not_finite:
            arrived.append((self.rows.pop(handle), NotFiniteError("the logits are not finite", number)))
        return arrived

    def remove(self, reply: BatchedReply) -> None:
        """Give a row up, if it is one."""
        handle = next((handle for handle, other in self.rows.items() if other is reply), None)
        if handle is not None:
            del self.rows[handle]
            with contextlib.suppress(EngineLost):  # which the next step reports
                self._begun().remove(handle)
