"""Calls of an arm's deployment through its handle of Ray Serve."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError

from marl_ray.serving.arms.errors import ArmError, LostError, busy_error, new_pass_number


def cached_handle(handle: Any, **options: Any) -> Callable[[], Any]:
    """Return a function that returns the handle with these options, which it makes at its first call.

    Making one costs as much as a request. Serve's throughput mode binds a handle to the event loop, but threads make arms.
    """
    return cache(lambda: handle.options(**options))


async def answer_of(send: Callable[[], Any]) -> Any:
    """Return the answer of a call through a handle, which is sent once more if it is lost.

    It may be sent again because neither acts nor scores change the arm. Raises LostError if the second call is lost too,
    ArmError if the arm's own code failed, BusyError if Serve refuses the call because its queue is full.
    """
    reason = ""
    for _ in range(2):
        response = send()
        try:
            return await response
        except BackPressureError as error:
            raise busy_error(str(error)) from None
        except RayTaskError as error:
            raise ArmError(repr(error), new_pass_number()) from None
        except asyncio.CancelledError:
            response.cancel()  # else the replica would continue computing an answer that nobody reads
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            reason = "the call was cancelled"  # the other process cancelled it
        except Exception as error:  # an actor died, a connection broke, Serve failed: the call is lost
            reason = repr(error)
    raise LostError(f"two calls were lost, the last one by {reason}", new_pass_number())
