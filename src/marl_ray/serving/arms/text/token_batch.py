"""The batch of one language model: the responses that it writes now, a row each, token by token."""

import contextlib
from collections.abc import Sequence

from marl_ray.config.run.model import GenerationConfig
from marl_ray.policies.engines.base import EngineLostError
from marl_ray.serving.arms.errors import NotFiniteError
from marl_ray.serving.arms.text.reply import BatchedReply, ReplyEvent
from marl_ray.serving.arms.text.served_model import ServedModel


class TokenBatch:
    """The rows of one model; only the arm's thread touches them."""

    def __init__(self, model: ServedModel):
        """Load the engine. Raises MarlRayError for a model that cannot be decoded here."""
        self.model = model
        self.engine = model.server(model.policy)
        self.bytes_per_row = self.engine.bytes_per_row
        self.rows: dict[int, BatchedReply] = {}
        self.engine.decoder()

    def clear(self) -> None:
        """Begin with an empty batch."""
        self.rows.clear()
        self.engine.abandon()

    def close(self) -> None:
        """Release what the engine holds."""
        self.engine.close()

    def add(self, new: Sequence[BatchedReply]) -> None:
        """Begin the responses of these replies, prompts of equal options together. Raises what the engine raises."""
        groups: dict[GenerationConfig, list[BatchedReply]] = {}
        for reply in new:
            groups.setdefault(reply.generation, []).append(reply)
        for generation, group in groups.items():
            # The request's seed is the stream of a common one, so that prompts can be read together.
            handles = self.engine.decoder().add([reply.prompt for reply in group], 0, generation)
            self.rows.update(zip(handles, group, strict=True))

    def step(self, number: int) -> list[tuple[BatchedReply, ReplyEvent]]:
        """Draw the next token of every row; `number` is that of the step.

        A row with logits that are not finite gets its failure instead.
        """
        arrived: list[tuple[BatchedReply, ReplyEvent]] = []
        not_finite: list[int] = []
        for token in self.engine.decoder().step(not_finite):
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
            with contextlib.suppress(EngineLostError):  # which the next step reports
                self.engine.decoder().remove(handle)
