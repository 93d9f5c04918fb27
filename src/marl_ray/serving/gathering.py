"""Requests that share calls of another process: a call costs many times what a request in it costs.

Nobody waits for company: a request goes at once while few enough calls are under way. Those that come meanwhile go together
as soon as one ends, so a call has the more requests the busier the other side is.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, cast

from marl_ray.serving.deadlines import Deadlines

Given = TypeVar("Given")
Answer = TypeVar("Answer")

CALLS = 2
"""Calls per replica that are under way: one that it works on, and one that is there when it has done so."""
LARGEST = 256
"""Requests of one call at most."""


class Gathering(Generic[Given, Answer]):
    """Requests to one callee, on one event loop."""

    def __init__(
        self,
        call: Callable[[Sequence[Given]], Awaitable[Sequence[Answer | Exception]]],
        replicas: int,
        deadline_s: float,
    ):
        """`call` gives an answer per request, or why there is none; one of `replicas` takes it. `deadline_s` is a request's
        and a call's."""
        self._call, self._replicas, self._deadline_s = call, replicas, deadline_s
        self._most = CALLS * replicas
        self._deadlines = Deadlines()
        self._waiting: list[tuple[Given, asyncio.Future[Answer]]] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._sends_soon = False

    async def ask(self, given: Given) -> Answer:
        """The answer; what the call raised, or TimeoutError after the deadline."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((given, answer))
        if not self._sends_soon and len(self._under_way) < self._most:
            # After all callbacks that are ready now, and those are the other requests of this moment.
            self._sends_soon = True
            loop.call_soon(self._send)
        return await self._deadlines.run(answer, self._deadline_s)

    def _send(self) -> None:
        self._sends_soon = False
        while self._waiting and len(self._under_way) < self._most:
            idle = max(1, self._replicas - len(self._under_way))
            size = min(LARGEST, -(-len(self._waiting) // idle))
            chosen, self._waiting = self._waiting[:size], self._waiting[size:]
            asked = [one for one in chosen if not one[1].done()]  # done: it was given up
            if asked:
                # In no client's context: Serve would give all requests that one's id, and cancel them with it.
                task = asyncio.get_running_loop().create_task(self._answered(asked), context=contextvars.Context())
                self._under_way.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._send()

    async def _answered(self, asked: Sequence[tuple[Given, asyncio.Future[Answer]]]) -> None:
        found: Sequence[Answer | Exception]
        try:
            async with asyncio.timeout(self._deadline_s):
                found = await self._call([given for given, _ in asked])
            if len(found) != len(asked):
                raise ValueError(f"expected {len(asked)} answers, got {len(found)}")
        except asyncio.CancelledError:
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            found = [ConnectionError("the call was cancelled")] * len(asked)  # by the other side
        except Exception as error:  # each request reports it
            found = [error] * len(asked)
        for (_, answer), one in zip(asked, found, strict=True):
            if answer.done():
                continue
            if isinstance(one, Exception):
                answer.set_exception(one)
            else:
                answer.set_result(one)
