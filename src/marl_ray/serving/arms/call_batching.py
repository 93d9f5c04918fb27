"""Requests that share calls of another process: a call costs many times what a request in it costs.

A request goes out at once if few enough calls are under way; it never waits for others. Otherwise it is queued, and all
queued requests go out in one call as soon as a call ends. So calls grow with the load of the other side.
"""

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, cast

from marl_ray.serving.arms.errors import ArmError, LostError, busy, new_pass
from marl_ray.serving.http.deadlines import Deadlines
from marl_ray.serving.http.protocol import RequestError

Given = TypeVar("Given")
Returned = TypeVar("Returned")

CALLS_PER_REPLICA = 2
"""Calls per replica that are under way: one that it works on, and one that is there when it has done so."""
LARGEST_CALL = 256
"""Requests of one call at most."""


class _CallRequest(Generic[Given, Returned]):
    __slots__ = ("answer", "answered_before", "call", "given", "sent_at")

    def __init__(self, given: Given, answer: "asyncio.Future[Returned]", answered_before: int):
        self.given, self.answer, self.answered_before = given, answer, answered_before
        self.call: int | None = None  # its number, and when it was sent; none while the request waits
        self.sent_at = math.inf


class CallBatcher(Generic[Given, Returned]):
    """Shares calls between requests to one callee, on one event loop."""

    def __init__(
        self,
        call: Callable[[Sequence[Given]], Awaitable[Sequence[Returned | Exception]]],
        replicas: int,
        deadline_s: float,
    ):
        """`call` returns one answer per request, or an error in its place; one of `replicas` takes it. `deadline_s`
        limits a request and a call."""
        self._call, self._replicas, self._deadline_s = call, replicas, deadline_s
        self._most = CALLS_PER_REPLICA * replicas
        self._deadlines = Deadlines()
        self._waiting: list[_CallRequest[Given, Returned]] = []
        self._under_way: dict[asyncio.Task[None], int] = {}
        """Calls and their numbers, the oldest first."""
        self._answered_calls = 0
        self._sends_soon = False

    async def ask(self, given: Given) -> Returned:
        """The answer, or what the call raised: LostError after the deadline, with the number of its call. A request that
        waited most of that time for room in a call is refused (RequestError 503) if other calls were answered meanwhile."""
        loop = asyncio.get_running_loop()
        request = _CallRequest[Given, Returned](given, loop.create_future(), self._answered_calls)
        self._waiting.append(request)
        if not self._sends_soon and len(self._under_way) < self._most:
            # After all callbacks that are ready now, and those are the other requests of this moment.
            self._sends_soon = True
            loop.call_soon(self._send)
        try:
            return await self._deadlines.run(request.answer, self._deadline_s)
        except TimeoutError:
            waited = loop.time() - request.sent_at < self._deadline_s / 2
            if waited and self._answered_calls > request.answered_before:
                raise busy(f"no room in a call for most of {self._deadline_s:g} s") from None
            number = request.call or next(iter(self._under_way.values()), new_pass())  # of a call that hangs
            raise LostError(f"no answer within {self._deadline_s:g} s", number) from None

    def _send(self) -> None:
        self._sends_soon = False
        while self._waiting and len(self._under_way) < self._most:
            idle = max(1, self._replicas - len(self._under_way))
            size = min(LARGEST_CALL, -(-len(self._waiting) // idle))
            chosen, self._waiting = self._waiting[:size], self._waiting[size:]
            requests = [request for request in chosen if not request.answer.done()]  # done: it was given up
            if requests:
                number = new_pass()
                now = asyncio.get_running_loop().time()
                for request in requests:
                    request.call, request.sent_at = number, now
                # In no client's context: Serve would give all requests that one's id, and cancel them with it.
                task = asyncio.get_running_loop().create_task(
                    self._answer(requests, number), context=contextvars.Context()
                )
                self._under_way[task] = number
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        self._send()

    async def _answer(self, requests: Sequence[_CallRequest[Given, Returned]], number: int) -> None:
        answers: Sequence[Returned | Exception]
        try:
            async with asyncio.timeout(self._deadline_s):
                answers = await self._call([request.given for request in requests])
            if len(answers) != len(requests):
                raise ValueError(f"expected {len(requests)} answers, got {len(answers)}")
            self._answered_calls += 1
        except asyncio.CancelledError:
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            answers = [LostError("the call was cancelled", number)] * len(requests)  # by the other side
        except (ArmError, RequestError) as error:  # each request reports it
            answers = [error] * len(requests)
        except TimeoutError:
            answers = [LostError(f"no answer within {self._deadline_s:g} s", number)] * len(requests)
        except Exception as error:
            answers = [ArmError(str(error), number)] * len(requests)
        for request, answer in zip(requests, answers, strict=True):
            if request.answer.done():
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
            else:
                request.answer.set_result(answer)


def on_loop(handle: Any, **options: Any) -> Callable[[], Any]:
    """Gives the handle with these options, made once, as that costs as much as a request; and by the first call, as Serve's
    throughput mode wants it made on the event loop that uses it, while arms are made in threads."""
    return cache(lambda: handle.options(**options))
