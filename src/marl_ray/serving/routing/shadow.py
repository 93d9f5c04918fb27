"""Copies of requests for shadow arms, whose answers no client gets."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from marl_ray.errors import one_line
from marl_ray.serving.arms.errors import ArmError, new_pass_number
from marl_ray.serving.arms.protocol import Answer, ResponseChunk, ScoringArm, TextArm, TextRequest
from marl_ray.serving.errors import ServingError

ActCall = Callable[[Mapping[str, np.ndarray], bool, Mapping[str, np.ndarray]], Awaitable[Answer]]
"""Observations, whether greedy, and action masks -> answer."""
TEXT_DEADLINE_S = 60.0
"""Seconds that a copy of a text may take."""
COMPLAINT_S = 60.0
"""Minimum seconds between two log lines about an arm's errors."""
_log = logging.getLogger(__name__)


@dataclass
class ShadowTotals:
    """Counts of one arm's copies since the replica started."""

    acts: int = 0
    """Copies that were answered."""
    errors: int = 0
    """Copies that failed or took too long."""
    dropped: int = 0
    """Copies that were not sent, because too many were under way."""
    decisions: int = 0
    """Actions, or texts, of the answered copies, one per agent."""
    agreed: int = 0
    """Decisions that equal the client's."""
    seconds: float = 0.0
    """Time that all answered copies took together, in seconds."""
    tokens: int = 0
    """Tokens of the served texts, in the shadow arm's vocabulary."""
    log_prob: float = 0.0
    """Sum of the log-probabilities that the shadow arm gives these tokens, at its bundle's temperature."""
    served_log_prob: float = 0.0
    """Sum of the log-probabilities with which they were served."""


class CopyComparison(NamedTuple):
    """The comparison of one copy with the client's answer; fields are those of `ShadowTotals`."""

    decisions: int
    agreed: int
    tokens: int = 0
    log_prob: float = 0.0
    served_log_prob: float = 0.0


class Shadows:
    """Sends the copies of one replica, on its event loop, and compares the answers."""

    def __init__(self, limit: int, deadline_s: float = 5.0, clock: Callable[[], float] = time.monotonic):
        """Keep at most `limit` copies under way, each for at most `deadline_s`. `clock` gives seconds."""
        self.totals: dict[str, ShadowTotals] = {}
        """Arm -> its totals."""
        self._limit = limit
        self._deadline_s = deadline_s
        self._clock = clock
        self._logged_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def under_way(self) -> int:
        """Number of copies that have not been answered yet."""
        return len(self._tasks)

    def send(
        self,
        arm: str,
        act: ActCall,
        observations: Mapping[str, np.ndarray],
        masks: Mapping[str, np.ndarray],
        answer: Answer,
    ) -> bool:
        """Send a copy of an act to the arm in the background, and compare it with `answer`.

        The arm acts greedily. Returns whether the copy was sent. Never raises.
        """

        async def compare() -> CopyComparison:
            copied = await act(observations, True, masks)
            agreed = sum(np.array_equal(action, copied[agent][0]) for agent, (action, _) in answer.items())
            return CopyComparison(len(answer), agreed)

        return self._send(arm, compare, self._deadline_s)

    def send_text(
        self, arm: str, writer: TextArm, request: TextRequest, ids: Sequence[int], log_probs: Sequence[float], text: str
    ) -> bool:
        """Let the arm write its own response in the background, and compare it with the served text.

        The seed and the settings are the same, and the arm computes its log-probability of the served text. Returns
        whether the copy was sent. Never raises.
        """

        async def compare() -> CopyComparison:
            chunks = await _await_response(writer, replace(request, logged=True, streamed=False, has_names=False))
            agreed = "".join(chunk.text for chunk in chunks) == text
            began = chunks[0].start
            if began is None or not ids or not isinstance(writer, ScoringArm):  # one of the two arms reports no tokens
                return CopyComparison(1, int(agreed))
            tokens, log_prob = await writer.score(request.agent, began.prompt_ids, ids, text)
            return CopyComparison(1, int(agreed), tokens, log_prob, sum(log_probs))

        return self._send(arm, compare, TEXT_DEADLINE_S)

    def _send(self, arm: str, compare: Callable[[], Awaitable[CopyComparison]], deadline_s: float) -> bool:
        totals = self.totals.setdefault(arm, ShadowTotals())
        if self._closed or self.under_way >= self._limit:
            totals.dropped += 1
            return False
        task = asyncio.create_task(self._copy(arm, compare, deadline_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def close(self) -> None:
        """Cancel all copies under way and wait for their end, for at most a copy's deadline."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._deadline_s)

    async def _copy(self, arm: str, compare: Callable[[], Awaitable[CopyComparison]], deadline_s: float) -> None:
        totals = self.totals[arm]
        begun = self._clock()
        try:
            try:
                async with asyncio.timeout(deadline_s):
                    compared = await compare()
            except TimeoutError:
                raise TimeoutError(f"no answer within {deadline_s:g} s") from None
        # A cancellation that does not come from `close` is an error of the arm.
        except (Exception, asyncio.CancelledError) as error:
            if not self._closed:
                totals.errors += 1
                self._log_failure(arm, totals, error)
            return
        totals.acts += 1
        for name, value in compared._asdict().items():
            setattr(totals, name, getattr(totals, name) + value)
        totals.seconds += self._clock() - begun

    def _log_failure(self, arm: str, totals: ShadowTotals, error: BaseException) -> None:
        now = self._clock()
        if now - self._logged_at.get(arm, -math.inf) < COMPLAINT_S:
            return
        self._logged_at[arm] = now
        _log.warning("shadow %s: %d copies failed so far, this one of %s", arm, totals.errors, _describe_error(error))


async def _await_response(writer: TextArm, request: TextRequest) -> list[ResponseChunk]:
    """Wait for a whole response; ArmError if it is refused."""
    reply = writer.write(request)
    try:
        chunks: list[ResponseChunk] = []
        while not chunks or chunks[-1].finish is None:
            chunks.append(await reply.next())
        return chunks
    except ServingError as error:
        raise ArmError(f"refused: {error}", new_pass_number()) from None
    finally:
        reply.leave()


def _describe_error(error: BaseException) -> str:
    name = type(error).__name__
    return name if not str(error).strip() else f"{name}: {one_line(error)}"
