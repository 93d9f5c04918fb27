"""Shares calls to another process between requests, because a call costs far more than one more request in it.

A request is sent at once if fewer than the maximum of calls are under way. Otherwise it is queued, and the whole queue
is sent in one call as soon as a call ends. So calls grow with the load of the other process.
"""

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, cast

from marl_ray.deadlines.shared_timer import Deadlines
from marl_ray.serving.arms.errors import ArmError, LostError, busy_error, new_pass_number
from marl_ray.serving.errors import ServingError

Argument = TypeVar("Argument")
CallAnswer = TypeVar("CallAnswer")

CALLS_PER_REPLICA = 2
"""Calls under way per replica: one that it computes, and one that waits for it."""
MAX_CALL_SIZE = 256
"""Maximum number of requests in one call."""


class _CallRequest(Generic[Argument, CallAnswer]):
    """A request until its call has answered it."""

    __slots__ = ("answer", "answered_before", "argument", "call", "sent_at")

    def __init__(self, argument: Argument, answer: "asyncio.Future[CallAnswer]", answered_before: int):
        self.argument = argument
        self.answer = answer
        self.answered_before = answered_before
        self.call: int | None = None  # the number of its call; None while the request waits
        self.sent_at = math.inf


class CallBatcher(Generic[Argument, CallAnswer]):
    """Batches requests to one callee, on one event loop."""

    def __init__(
        self,
        call: Callable[[Sequence[Argument]], Awaitable[Sequence[CallAnswer | Exception]]],
        replicas: int,
        deadline_s: float,
    ):
        """Batch the requests to `call`, which returns one answer or one error for each.

        One of `replicas` computes a call. `deadline_s` limits a request and a call, in seconds.
        """
        self._call = call
        self._replicas = replicas
        self._deadline_s = deadline_s
        self._max_calls = CALLS_PER_REPLICA * replicas
        self._deadlines = Deadlines()
        self._waiting: list[_CallRequest[Argument, CallAnswer]] = []
        self._under_way: dict[asyncio.Task[None], int] = {}
        """Calls under way -> their numbers, the oldest first."""
        self._answered_calls = 0
        self._is_send_due = False

    async def ask(self, argument: Argument) -> CallAnswer:
        """Return the answer, or raise the error that the call raised for this request.

        Raises LostError after the deadline, with the number of the call. Raises BusyError if the request waited most
        of that time for room in a call while other calls were answered.
        """
        loop = asyncio.get_running_loop()
        request = _CallRequest[Argument, CallAnswer](argument, loop.create_future(), self._answered_calls)
        self._waiting.append(request)
        if not self._is_send_due and len(self._under_way) < self._max_calls:
            # Runs after all callbacks that are ready now, so the call includes all requests that have just arrived.
            self._is_send_due = True
            loop.call_soon(self._send)
        try:
            return await self._deadlines.run(request.answer, self._deadline_s)
        except TimeoutError:
            waited_for_room = loop.time() - request.sent_at < self._deadline_s / 2
            if waited_for_room and self._answered_calls > request.answered_before:
                raise busy_error(f"no room in a call for most of {self._deadline_s:g} s") from None
            # If the request was never sent, the oldest call hangs.
            number = request.call or next(iter(self._under_way.values()), new_pass_number())
            raise LostError(f"no answer within {self._deadline_s:g} s", number) from None

    def _send(self) -> None:
        self._is_send_due = False
        while self._waiting and len(self._under_way) < self._max_calls:
            idle = max(1, self._replicas - len(self._under_way))
            size = min(MAX_CALL_SIZE, -(-len(self._waiting) // idle))
            batch = self._waiting[:size]
            self._waiting = self._waiting[size:]
            # Requests that were given up are left out.
            requests = [request for request in batch if not request.answer.done()]
            if requests:
                number = new_pass_number()
                now = asyncio.get_running_loop().time()
                for request in requests:
                    request.call = number
                    request.sent_at = now
                # In an empty context, because Serve would give the whole call the request id of one client, and cancel
                # it with that client.
                task = asyncio.get_running_loop().create_task(
                    self._answer(requests, number), context=contextvars.Context()
                )
                self._under_way[task] = number
                task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        self._send()

    async def _answer(self, requests: Sequence[_CallRequest[Argument, CallAnswer]], number: int) -> None:
        answers: Sequence[CallAnswer | Exception]
        try:
            async with asyncio.timeout(self._deadline_s):
                answers = await self._call([request.argument for request in requests])
            if len(answers) != len(requests):
                raise ValueError(f"expected {len(requests)} answers, got {len(answers)}")
            self._answered_calls += 1
        except asyncio.CancelledError:
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            answers = [LostError("the call was cancelled", number)] * len(requests)  # the other process cancelled it
        except (ArmError, ServingError) as error:  # each request reports it
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
