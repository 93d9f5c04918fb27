"""An arm of language models in this process, with continuous batching.

One thread per arm computes the next token of all its responses in one step. Between steps new responses join, and those
leave that are complete or whose client has gone. An arm has one bundle, so its batch has no other arm's responses.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from marl_ray.closing import close_all
from marl_ray.config.run.model import DEFAULT_ENGINE
from marl_ray.policies.bundles.language import TokenBundle
from marl_ray.policies.engines.serving import served_engine
from marl_ray.policies.engines.torch_engine import CACHE_BYTES
from marl_ray.serving.arms.errors import ArmError, busy_error, new_pass_number
from marl_ray.serving.arms.protocol import TextRequest
from marl_ray.serving.arms.text.reply import BatchedReply, deliver
from marl_ray.serving.arms.text.served_model import ServedModel
from marl_ray.serving.arms.text.token_batch import TokenBatch
from marl_ray.serving.errors import UnavailableError

MAX_WAITING = 256
"""Maximum number of responses of one arm that wait for room in the batch; further ones are refused."""
CLOSE_S = 10.0
"""Seconds that closing waits for the current step."""

_log = logging.getLogger(__name__)


class TextBatcher:
    """Writes the responses of one arm."""

    def __init__(self, bundle: TokenBundle, max_batch: int, patience_s: float, engine: str = DEFAULT_ENGINE):
        """Load all models of the bundle.

        The batch has at most `max_batch` responses, fewer if the memory for their caches is short. A response that
        waits longer than `patience_s` for its turn is refused, and one that gets no token for as long has failed.
        Raises MarlRayError for a model that cannot be decoded here.
        """
        self.bundle = bundle
        self.step_number = new_pass_number()
        """The number of the current step, or of the last one."""
        self.patience_s = patience_s
        policies = bundle.policies
        policy = policies.load_unmerged if served_engine(engine).loads_adapters else policies.__getitem__
        self._batches: dict[str, TokenBatch] = {}
        try:
            for name in policies:
                self._batches[name] = TokenBatch(ServedModel(policy(name), engine))
        except BaseException:
            self._close_batches()
            raise
        device = next(iter(self._batches.values())).model.policy.device
        memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else CACHE_BYTES
        bytes_per_response = sum(batch.bytes_per_row for batch in self._batches.values())
        self._max_rows = max(1, min(max_batch, memory // max(1, bytes_per_response)))
        self._wake = threading.Condition()
        # The lock guards these, which the arm's thread shares:
        self._waiting: deque[BatchedReply] = deque()
        self._abandoned: list[BatchedReply] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        # A pool of its own, because slow passes of shadows would occupy all common threads, which encode the clients'
        # prompts.
        self._scorer = ThreadPoolExecutor(1, "text-scores")

    @property
    def rows(self) -> int:
        """The number of responses in the batch or in the queue."""
        return self._count_rows() + len(self._waiting)

    def write(self, request: TextRequest) -> BatchedReply:
        """Begin a response on the event loop, and return it at once.

        The response is queued when its first chunk is asked for.
        """
        return BatchedReply(self, self.model(request.agent), request, self.patience_s)

    async def score(self, agent: str, prompt_ids: Sequence[int], ids: Sequence[int], text: str) -> tuple[int, float]:
        """See `ScoringArm.score`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._scorer, self.model(agent).score, prompt_ids, ids, text)

    def model(self, agent: str) -> ServedModel:
        """Return the model that writes for the agent."""
        return self.batch(agent).model

    def batch(self, agent: str) -> TokenBatch:
        """Return the batch of the model that writes for the agent."""
        return self._batches[self.bundle.agents[agent]]

    def close(self) -> None:
        """See `TextArm.close`; ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._scorer.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._close_batches()

    def _close_batches(self) -> None:
        close_all(batch.close for batch in self._batches.values())

    def join(self, reply: BatchedReply) -> None:
        """See `ReplyQueue.join`."""
        with self._wake:
            if self._closing:  # since the request was assigned, while its prompt was encoded
                raise _closed_error()
            if len(self._waiting) >= MAX_WAITING:
                raise busy_error(f"{MAX_WAITING} responses wait already")
            self._waiting.append(reply)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="text-arm", daemon=True)
                self._thread.start()
            self._wake.notify()

    def leave(self, reply: BatchedReply) -> None:
        """See `ReplyQueue.leave`."""
        with self._wake:
            # At once, because the thread may hang, and lost responses must not look like a full queue.
            if reply in self._waiting:
                self._waiting.remove(reply)
            else:
                self._abandoned.append(reply)
                self._wake.notify()

    def _run(self) -> None:
        """Compute step after step until the arm is closed; the arm's thread."""
        while True:
            with self._wake:
                while not (self._waiting or self._abandoned or self._closing or self._count_rows()):
                    self._wake.wait()
                for reply in self._abandoned:
                    for batch in self._batches.values():
                        batch.remove(reply)
                self._abandoned = []
                room = self._max_rows - self._count_rows()
                new = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
                for reply in new:
                    reply.has_turn = True
                if self._closing:
                    self._reject_all([*new, *self._waiting])
                    return
            for batch in self._batches.values():
                self._step(batch, [reply for reply in new if reply.model is batch.model])

    def _step(self, batch: TokenBatch, new: list[BatchedReply]) -> None:
        self.step_number = new_pass_number()
        try:
            batch.add(new)
            tokens = batch.step(self.step_number)
        except Exception as error:  # each request reports the error, and the arm continues with an empty batch
            _log.error("a batch of %d responses failed: %r", len(batch.rows) + len(new), error)
            failing = dict.fromkeys([*batch.rows.values(), *new])
            batch.clear()
            failed = ArmError(f"its step failed: {error!r}", self.step_number)
            deliver([(reply, failed) for reply in failing])
        else:
            deliver(tokens)

    def _count_rows(self) -> int:
        return sum(len(batch.rows) for batch in self._batches.values())

    def _reject_all(self, waiting: Sequence[BatchedReply]) -> None:
        rows = [reply for batch in self._batches.values() for reply in batch.rows.values()]
        deliver([(reply, _closed_error()) for reply in (*rows, *waiting)])


def _closed_error() -> UnavailableError:
    """Return the end of a response of a closed arm: a refusal, because a failure would count against the arm."""
    return UnavailableError("this replica is closing the arm")
