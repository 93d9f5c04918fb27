"""Lookups of sessions' arms in the database; lookups of the same moment share one statement."""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from marl_ray.deadlines.side_by_side import shut_down
from marl_ray.experiments.assignment.rendezvous import Assignment

MAX_UNITS = 500
"""Maximum number of units in one statement."""
MIN_INTERVAL_S = 0.005
"""Minimum seconds between two statements, in which new sessions gather for the next one."""
CLOSE_S = 10.0
"""Seconds that closing waits for statements; each has a shorter limit, unless the connection hangs."""
UnitKey = tuple[str, str]
"""Experiment and unit."""
Answers = Mapping[UnitKey, Assignment]

_log = logging.getLogger(__name__)


class ArmLookups:
    """Batches lookups on one event loop.

    The first is sent at once, and those of the next 5 ms share a statement, because a statement costs many times what a
    unit in it costs.
    """

    def __init__(self, read: Callable[[Sequence[UnitKey]], Answers], threads: int):
        """`read` blocks on the database; at most `threads` of its calls are under way."""
        self.read = read
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="experiment-lookup")
        self._max_statements = threads
        self._statements = set[asyncio.Task[None]]()
        self._waiting: dict[UnitKey, asyncio.Future[Assignment | None]] = {}
        self._under_way: dict[UnitKey, asyncio.Future[Assignment | None]] = {}
        self._is_send_due = False
        self._next_at = 0.0

    async def look_up(self, experiment: str, unit: str) -> Assignment | None:
        """Return the arm of the unit's exposure in the store, None if it has none. Raises the errors of `read`."""
        key = experiment, unit
        # A statement under way may have missed an exposure written meanwhile, but so may the first caller's own
        # statement.
        answer = self._under_way.get(key) or self._waiting.get(key)
        if answer is None:
            answer = self._waiting[key] = asyncio.get_running_loop().create_future()
            self._send_soon()
        return await asyncio.shield(answer)  # a cancelled caller must not cancel the shared future

    def _send_soon(self) -> None:
        if not self._is_send_due and len(self._statements) < self._max_statements:
            self._is_send_due = True
            asyncio.get_running_loop().call_at(self._next_at, self._send)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_send_due = False
        self._next_at = loop.time() + MIN_INTERVAL_S
        batch = dict(list(self._waiting.items())[:MAX_UNITS])
        for key in batch:
            del self._waiting[key]
        self._under_way |= batch
        # An empty context, because the task serves several requests.
        task = loop.create_task(self._answer(batch), context=contextvars.Context())
        self._statements.add(task)
        task.add_done_callback(self._note_end)
        if self._waiting:
            self._send_soon()

    async def _answer(self, batch: Mapping[UnitKey, "asyncio.Future[Assignment | None]"]) -> None:
        try:
            answers = await asyncio.get_running_loop().run_in_executor(self._threads, self.read, list(batch))
        except Exception as error:
            self._settle(batch, error=error)
        else:
            self._settle(batch, answers)

    def _note_end(self, task: "asyncio.Task[None]") -> None:
        self._statements.discard(task)
        if self._waiting:
            self._send_soon()

    def _settle(
        self,
        batch: Mapping[UnitKey, "asyncio.Future[Assignment | None]"],
        answers: Answers | None = None,
        error: Exception | None = None,
    ) -> None:
        for key, answer in batch.items():
            self._under_way.pop(key, None)
            if error is None:
                answer.set_result((answers or {}).get(key))
            else:
                answer.set_exception(error)
                answer.exception()  # retrieved, so that asyncio logs no error if all callers have left

    def close(self) -> None:
        """Cancel the lookups that have not begun, and wait CLOSE_S seconds for the others to end."""
        if not shut_down(self._threads, CLOSE_S):
            _log.error("a lookup of sessions' arms has not ended within %g s", CLOSE_S)
