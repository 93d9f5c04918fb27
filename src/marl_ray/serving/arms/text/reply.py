"""One response of a language model in this process, from its prompt to its last token."""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from typing import Protocol

from typing_extensions import override

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.policies.engines.base import Prompt, Token
from marl_ray.policies.prompting.prompts import PromptTooLongError
from marl_ray.serving.arms.errors import ArmError, LostError, busy_error
from marl_ray.serving.arms.protocol import Reply, ResponseChunk, ResponseStart, TextRequest
from marl_ray.serving.arms.text.detokenizer import Detokenizer
from marl_ray.serving.arms.text.served_model import ServedModel
from marl_ray.serving.errors import InvalidRequestError, ServingError

ReplyEvent = Token | ArmError | ServingError
"""The next token of a response, or its end without one."""


class ReplyQueue(Protocol):
    """The arm as one of its responses sees it."""

    step_number: int
    """The number of the step that is under way, or was the last one."""

    def join(self, reply: "BatchedReply") -> None:
        """Queue a response.

        Raises BusyError if too many wait already, and UnavailableError if the arm is closed.
        """

    def leave(self, reply: "BatchedReply") -> None:
        """Take a response out, whether it waits or is being written."""


class BatchedReply(Reply):
    """One response on its way, a `Reply`.

    The event loop makes and asks it. The arm's thread reads its prompt and settings.
    """

    prompt: Prompt
    generation: GenerationConfig

    def __init__(self, arm: ReplyQueue, model: ServedModel, request: TextRequest, patience_s: float):
        self.model = model
        self.has_turn = False
        """True once the arm's thread has taken it out of the queue."""
        self.loop = asyncio.get_running_loop()
        self._arm = arm
        self._request = request
        self._patience_s = patience_s
        self._new_tokens: list[Token] = []
        self._end: ArmError | ServingError | None = None
        self._arrived = asyncio.Event()
        self._queued = self._begun = self._finished = False
        self._detokenizer = Detokenizer(self.model.tokenizer)

    @override
    async def next(self) -> ResponseChunk:
        if not self._queued:
            await self._begin()
        step_before = self._arm.step_number
        try:
            async with asyncio.timeout(self._patience_s):
                await self._arrived.wait()
        except TimeoutError:
            if not self.has_turn and self._arm.step_number != step_before:
                raise busy_error(f"no room in the batch within {self._patience_s:g} s") from None
            if not self._new_tokens:
                raise LostError(f"no token within {self._patience_s:g} s", self._arm.step_number) from None
        if self._end is not None:
            raise self._end
        tokens = self._new_tokens
        self._new_tokens = []
        self._arrived.clear()
        began = self._make_start() if self._request.logged and not self._begun else None
        self._begun = True
        finish = tokens[-1].finish
        self._finished = finish is not None
        ids = [token.id for token in tokens]
        return ResponseChunk(
            self._detokenizer.add(ids, self._finished),
            ids,
            [token.log_prob for token in tokens],
            finish,
            len(self.prompt.ids),
            [self.model.name_token(number) for number in ids] if self._request.has_names else [],
            [[(self.model.name_token(number), p) for number, p in token.top] for token in tokens if token.top],
            began,
        )

    def _make_start(self) -> ResponseStart:
        generation = self.generation
        settings = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        return ResponseStart(list(self.prompt.ids), settings)

    @override
    def leave(self) -> None:
        if self._queued and not self._finished:
            self._finished = True
            self._arm.leave(self)

    async def _begin(self) -> None:
        """Read the prompt and the settings, and queue the response.

        Raises InvalidRequestError for a prompt or a setting that the model cannot take, and as `ReplyQueue.join` does.
        """
        request = self._request
        model = self.model
        try:
            # In a thread: a long prompt would hold up everybody.
            ids = await asyncio.to_thread(model.encode, request)
            guide = await asyncio.to_thread(model.guide, request)
            model.check_bias(request)
            self.generation = model.settings(request, len(ids))
            if not ids:
                raise FieldError("prompt", "expected at least one token")
        except FieldError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            raise InvalidRequestError(error.message, error.field, code=code) from None
        except MarlRayError as error:
            raise InvalidRequestError(str(error), "prompt") from None
        self.prompt = Prompt(tuple(ids), request.seed, request.greedy, guide, request.top, request.bias)
        if request.is_stop_hidden:
            self._detokenizer = Detokenizer(model.tokenizer, self.generation.stop)
        self._arm.join(self)
        self._queued = True

    def take(self, event: ReplyEvent) -> None:
        """Receive a token or an error from the arm's thread; runs on the event loop."""
        if not isinstance(event, Token):
            self._end = event
        else:
            self._new_tokens.append(event)
            if self._begun and event.finish is None and not self._request.streamed:
                return
        self._arrived.set()


def deliver(events: Sequence[tuple[BatchedReply, ReplyEvent]]) -> None:
    """Hand tokens and ends of responses over to their event loops, all of a loop at once."""

    def take_all(loop_events: Sequence[tuple[BatchedReply, ReplyEvent]]) -> None:
        for reply, event in loop_events:
            reply.take(event)

    for loop, loop_events in itertools.groupby(events, key=lambda pair: pair[0].loop):
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(take_all, list(loop_events))
