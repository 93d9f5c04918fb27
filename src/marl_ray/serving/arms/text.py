"""An arm of language models in this process: continuous batching.

One thread per arm takes a step for all responses on their way, token by token; between steps new ones join and those that
are done, or whose client has left, leave. An arm has one bundle, so arms never mix in a batch.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.policies.bundles.language import TokenBundle
from marl_ray.policies.engines.base import Prompt, Token
from marl_ray.policies.engines.decoding.decoder import Decoder
from marl_ray.policies.engines.decoding.json_guide import OBJECT, GuideState, guides_of
from marl_ray.policies.engines.torch_engine import CACHE_BYTES, cached_model
from marl_ray.policies.engines.vllm_engine import VllmEngine
from marl_ray.policies.engines.vllm_process.decoder import VllmDecoder
from marl_ray.policies.engines.vllm_process.process import EngineLost
from marl_ray.policies.prompting.prompts import encode_prompt, encode_text, uses_template
from marl_ray.policies.prompting.token_bytes import TokenBytes
from marl_ray.policies.prompting.tool_template import call_guide, encode_tool_chat
from marl_ray.serving.arms.detokenizer import Detokenizer
from marl_ray.serving.arms.errors import RETRY_AFTER_S, ArmError, LostError, NotFiniteError, new_pass
from marl_ray.serving.arms.protocol import Began, Messages, NamedToken, Piece, Refusal, TextRequest

WAITING = 256
"""Responses of one arm that may wait for room in the batch; more are refused with 503."""
CLOSE_S = 10.0
"""Seconds that closing waits for the step under way."""

ArmEngine = Literal["torch", "vllm"]
Arrived = Token | ArmError | Refusal
_log = logging.getLogger(__name__)


class TextBatcher:
    """Writes the responses of one arm."""

    def __init__(self, bundle: TokenBundle, max_batch: int, patience_s: float, engine: ArmEngine = "torch"):
        """At most `max_batch` responses are written at once, fewer where the memory for their caches is less; one that
        waits longer than `patience_s` for its turn is refused, and one that gets no token for as long has failed. Loads
        all models. Raises MarlRayError for one that cannot be decoded here."""
        self.bundle = bundle
        self.step_number = new_pass()
        """The number of the step that is under way, or was the last one."""
        self._patience_s = patience_s
        self._models = {name: _Model(policy, engine) for name, policy in bundle.policies.items()}
        device = next(iter(bundle.policies.values())).device
        memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CACHE_BYTES
        largest = sum(model.bytes_per_row for model in self._models.values())
        self._room = max(1, min(max_batch, memory // max(1, largest)))
        self._wake = threading.Condition()
        # Shared with the thread, under the lock:
        self._waiting: deque[_Writing] = deque()
        self._left: list[_Writing] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        # Of its own: shadows whose passes are slow would take all common threads, which read the clients' prompts.
        self._scorer = ThreadPoolExecutor(1, "text-scores")

    @property
    def rows(self) -> int:
        """The number of responses that are written or wait now."""
        return sum(len(model.rows) for model in self._models.values()) + len(self._waiting)

    def write(self, request: TextRequest) -> "_Writing":
        return _Writing(self, request, self._patience_s)

    async def score(self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """See `ScoringArm.score`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._scorer, self.model(agent).score, prompt_ids, ids, text)

    def model(self, agent: str) -> "_Model":
        return self._models[self.bundle.agents[agent]]

    def close(self) -> None:
        """See `TextArm.close`: the thread ends."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._scorer.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        for model in self._models.values():
            model.close()

    def join(self, writing: "_Writing") -> bool:
        """Queue a response; False if the queue is full."""
        with self._wake:
            if len(self._waiting) >= WAITING:
                return False
            self._waiting.append(writing)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="text-arm", daemon=True)
                self._thread.start()
            self._wake.notify()
        return True

    def leave(self, writing: "_Writing") -> None:
        """Take a response out, whether it waits or is being written."""
        with self._wake:
            self._left.append(writing)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._waiting or self._left or self._closing or self._busy()):
                    self._wake.wait()
                for writing in self._left:
                    writing.model.remove(writing)
                left = set(self._left)
                self._left = []
                self._waiting = deque(writing for writing in self._waiting if writing not in left)
                room = self._room - self._busy()
                new = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
                if self._closing:
                    self._end([*new, *self._waiting])
                    return
            for model in self._models.values():
                self._step(model, [writing for writing in new if writing.model is model])

    def _step(self, model: "_Model", new: list["_Writing"]) -> None:
        self.step_number = new_pass()
        try:
            model.add(new)
            tokens = model.step(self.step_number)
        except Exception as error:  # each request reports it; the arm goes on with an empty batch
            _log.error("a batch of %d responses failed: %r", len(model.rows) + len(new), error)
            failing = dict.fromkeys([*model.rows.values(), *new])
            model.clear()
            failed = ArmError(f"its step failed: {error!r}", self.step_number)
            _deliver([(writing, failed) for writing in failing])
        else:
            _deliver(tokens)

    def _busy(self) -> int:
        return sum(len(model.rows) for model in self._models.values())

    def _end(self, waiting: Sequence["_Writing"]) -> None:
        rows = [writing for model in self._models.values() for writing in model.rows.values()]
        # No failure, which would count against the arm.
        closed = Refusal(503, None, "this replica is closing", RETRY_AFTER_S)
        _deliver([(writing, closed) for writing in (*rows, *waiting)])


class _TooLongError(FieldError):
    """A prompt and its response do not fit the model's context together."""


class _Model:
    """One language model of an arm and the rows that it writes; all but `encode` belongs to the arm's thread."""

    def __init__(self, policy: Any, engine: ArmEngine):
        self._policy = policy
        # Log-probabilities of a stream cannot be computed again when its last token is there.
        self._vllm = VllmEngine(policy, processed=True) if engine == "vllm" else None
        self._cached = cached_model(policy) if self._vllm is None else None
        self.tokenizer, self.generation = policy.tokenizer, policy.generation
        self._token_bytes = TokenBytes(policy.tokenizer)
        per_token = self._cached.shape.bytes_per_token if self._cached is not None else 0  # vLLM minds its own memory
        self.bytes_per_row: int = per_token * policy.config.context
        self.clear()
        self._begun()
        if self._vllm is not None:  # its first steps compile kernels, which no client shall wait for
            self._vllm.generate([Prompt((0,), 0)], 0, GenerationConfig(max_tokens=2))

    def clear(self) -> None:
        """Begin with an empty batch, after a failure in a new process of vLLM."""
        self._decoder: Decoder | VllmDecoder | None = None
        self.rows: dict[int, _Writing] = {}
        self.close()

    def close(self) -> None:
        """End the process of vLLM, where there is one."""
        if self._vllm is not None:
            self._vllm.close()

    def _begun(self) -> Decoder | VllmDecoder:
        """The batch's decoder. Raises MarlRayError where vLLM cannot start."""
        if self._decoder is None and self._vllm is not None:
            self._decoder = self._vllm.decoder()
        elif self._decoder is None:
            assert self._cached is not None
            self._decoder = Decoder(self._cached, self.tokenizer, self._policy.end_tokens)
        return self._decoder

    def encode(self, request: TextRequest) -> list[int]:
        """Token ids of a prompt; FieldError if it has none, or one that no model of these knows."""
        chat, tokenizer, prompt = self._policy.config.chat, self.tokenizer, request.prompt
        if isinstance(prompt, str):
            return encode_prompt(tokenizer, prompt, False if request.raw else chat)
        if isinstance(prompt[0], int):
            ids: list[int] = [*prompt]
            if max(ids) >= len(tokenizer):
                raise FieldError("prompt", f"expected token ids below {len(tokenizer)}, got {max(ids)}")
            return ids
        messages: Messages = (*prompt,)
        if not uses_template(tokenizer, chat) and not request.tools:
            return encode_prompt(tokenizer, "\n".join(message["content"] for message in messages), False)
        return encode_tool_chat(tokenizer, messages, request.tools, chat)

    def named(self, token: int) -> NamedToken:
        """The token as clients read it; from any thread."""
        return NamedToken(self.tokenizer.decode([token]), self._token_bytes.bytes_of(token))

    def guide(self, request: TextRequest) -> GuideState | None:
        """The grammar that the response must follow, None without one; FieldError if this tokenizer cannot write
        it."""
        if not request.json_object and not request.must_call:
            return None
        field = "response_format" if request.json_object else "tool_choice"
        if self._vllm is not None:
            raise FieldError(field, "an arm with engine=vllm writes no JSON on demand")
        try:
            guides_of(self.tokenizer)
        except MarlRayError as error:
            raise FieldError(field, str(error)) from None
        if request.json_object:
            return OBJECT
        return call_guide(self.tokenizer, request.must_call)

    def check_bias(self, request: TextRequest) -> None:
        """Raise FieldError if the request biases a token that the model does not have, or if vLLM writes."""
        if self._vllm is not None and request.bias is not None:
            raise FieldError("logit_bias", "an arm with engine=vllm takes neither biases nor penalties")
        vocabulary = self._policy.lm.get_input_embeddings().weight.shape[0]
        largest = max((number for number, _ in request.bias.tokens), default=0) if request.bias is not None else 0
        if largest >= vocabulary:
            raise FieldError("logit_bias", f"expected token ids below {vocabulary}, got {largest}")

    def score(self, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """See `ScoringArm.score`; on the arm's scoring thread."""
        known = max(ids, default=0) < self._policy.lm.get_input_embeddings().weight.shape[0]
        read = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if known else ""
        own = list(ids) if known and read.startswith(text) else encode_text(self.tokenizer, text)
        if not own or len(prompt_ids) + len(own) > self._policy.config.context:
            raise ArmError(f"a text of {len(own)} tokens cannot be read here", new_pass())
        rows = [torch.tensor([one], device=self._policy.device) for one in (list(prompt_ids), own)]
        with torch.no_grad():
            evaluated = self._policy.evaluate(*rows, torch.ones_like(rows[1], dtype=torch.bool), False)
        return len(own), float(evaluated.log_probs.sum())

    def settings(self, request: TextRequest, prompt_tokens: int) -> GenerationConfig:
        """The settings for the request; _TooLongError if prompt and response do not fit the context."""
        context = self._policy.config.context
        # A default may be shortened by a long prompt, what was asked for may not.
        room = max(1, min(self.generation.max_tokens, context - prompt_tokens))
        # The policy's own stop strings could end what a guide asks for too early.
        own = {"stop": ()} if request.json_object or request.must_call else {}
        settings: GenerationConfig = self.generation.model_copy(update={"max_tokens": room, **own, **request.changes})
        if prompt_tokens + settings.max_tokens > context:
            raise _TooLongError(
                "prompt", f"{prompt_tokens} tokens and max_tokens={settings.max_tokens} exceed the context of {context}"
            )
        return settings

    def add(self, new: Sequence["_Writing"]) -> None:
        groups: dict[GenerationConfig, list[_Writing]] = {}
        for writing in new:
            groups.setdefault(writing.generation, []).append(writing)
        for generation, group in groups.items():
            # The request's seed is the stream of a common one, so that prompts can be read together.
            handles = self._begun().add([writing.prompt for writing in group], 0, generation)
            self.rows.update(zip(handles, group, strict=True))
            for writing in group:
                writing.joined = True

    def step(self, number: int) -> list[tuple["_Writing", Arrived]]:
        """Draw the next token of every row; a row with logits that are not finite gets its failure instead."""
        arrived: list[tuple[_Writing, Arrived]] = []
        not_finite: list[int] = []
        for token in self._begun().step(not_finite):
            arrived.append((self.rows[token.handle], token))
            if token.finish is not None:
                del self.rows[token.handle]
        for handle in not_finite:
            arrived.append((self.rows.pop(handle), NotFiniteError("the logits are not finite", number)))
        return arrived

    def remove(self, writing: "_Writing") -> None:
        """Give a row up, if it is one."""
        handle = next((handle for handle, other in self.rows.items() if other is writing), None)
        if handle is not None:
            del self.rows[handle]
            with contextlib.suppress(EngineLost):  # which the next step reports
                self._begun().remove(handle)


class _Writing:
    """One response on its way, a `Reply`. Made and asked on the event loop; the arm's thread reads its prompt."""

    prompt: Prompt
    generation: GenerationConfig

    def __init__(self, arm: TextBatcher, request: TextRequest, patience_s: float):
        self.model = arm.model(request.agent)
        self.joined = False
        """It is in the batch."""
        self.loop = asyncio.get_running_loop()
        self._arm, self._request, self._patience_s = arm, request, patience_s
        self._new: list[Token] = []
        self._end: ArmError | Refusal | None = None
        self._arrived = asyncio.Event()
        self._queued = self._begun = self._finished = False
        self._text = Detokenizer(self.model.tokenizer)

    async def next(self) -> Piece | Refusal:
        if not self._queued and (refusal := await self._begin()) is not None:
            return refusal
        step_before = self._arm.step_number
        try:
            async with asyncio.timeout(self._patience_s):
                await self._arrived.wait()
        except TimeoutError:
            if not self.joined and self._arm.step_number != step_before:
                return _refused(f"no room in the batch within {self._patience_s:g} s")
            if not self._new:
                raise LostError(f"no token within {self._patience_s:g} s", self._arm.step_number) from None
        if isinstance(self._end, Refusal):
            return self._end
        if self._end is not None:
            raise self._end
        tokens, self._new = self._new, []
        self._arrived.clear()
        began = self._beginning() if self._request.logged and not self._begun else None
        self._begun = True
        finish = tokens[-1].finish
        self._finished = finish is not None
        ids = [token.id for token in tokens]
        return Piece(
            self._text.add(ids, self._finished),
            ids,
            [token.log_prob for token in tokens],
            finish,
            len(self.prompt.ids),
            [self.model.named(number) for number in ids] if self._request.names else [],
            [[(self.model.named(number), p) for number, p in token.top] for token in tokens if token.top],
            began,
        )

    def _beginning(self) -> Began:
        generation = self.generation
        settings = {name: getattr(generation, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        return Began(list(self.prompt.ids), settings)

    def leave(self) -> None:
        if self._queued and not self._finished:
            self._finished = True
            self._arm.leave(self)

    async def _begin(self) -> Refusal | None:
        request, model = self._request, self.model
        try:
            # In a thread: a long prompt would hold up everybody.
            ids = await asyncio.to_thread(model.encode, request)
            guide = await asyncio.to_thread(model.guide, request)
            model.check_bias(request)
            self.generation = model.settings(request, len(ids))
            if not ids:
                raise FieldError("prompt", "expected at least one token")
        except FieldError as error:
            return Refusal(400, error.field, error.message, too_long=isinstance(error, _TooLongError))
        except MarlRayError as error:
            return Refusal(400, "prompt", str(error))
        self.prompt = Prompt(tuple(ids), request.seed, request.greedy, guide, request.top, request.bias)
        if request.hide_stop:
            self._text = Detokenizer(model.tokenizer, self.generation.stop)
        self._queued = self._arm.join(self)
        return None if self._queued else _refused(f"{WAITING} responses wait already")

    def take(self, arrived: Arrived) -> None:
        """Receive a token or an error from the arm's thread; runs on the event loop."""
        if not isinstance(arrived, Token):
            self._end = arrived
        else:
            self._new.append(arrived)
            if self._begun and arrived.finish is None and not self._request.streamed:
                return
        self._arrived.set()


def _refused(message: str) -> Refusal:
    return Refusal(503, None, f"the arm is busy: {message}", RETRY_AFTER_S)


def _deliver(arrived: Sequence[tuple[_Writing, Arrived]]) -> None:
    """Hand tokens over to the event loop, all of them at once."""

    def take(part: Sequence[tuple[_Writing, Arrived]]) -> None:
        for writing, token in part:
            writing.take(token)

    for loop, part in itertools.groupby(arrived, key=lambda pair: pair[0].loop):
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(take, list(part))
