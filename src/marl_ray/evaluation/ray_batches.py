"""Runs batches of samples on the actors of a Ray cluster; the batches of an actor that dies go to the others."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from marl_ray.errors import MarlRayError, one_line

if TYPE_CHECKING:
    from ray import ObjectRef

MAX_ATTEMPTS = 3
"""Number of actors that may die while they work on one batch; then the batch ends the evaluation."""
Actor = TypeVar("Actor")
Work = TypeVar("Work")
BatchResult = TypeVar("BatchResult")


def run_batches(
    actors: dict[str, Actor],
    work: Sequence[Work],
    size: int,
    call: "Callable[[Actor, tuple[Work, ...]], ObjectRef[BatchResult]]",
    *,
    in_flight: int,
    limit_s: Callable[[tuple[Work, ...]], float],
    task_of: Callable[[Work], str],
    done: str,
) -> Iterator[BatchResult]:
    """Yield the result of each batch of `size` samples, in the order in which they arrive.

    `actors` are by their names in messages; those that die are taken out. `call` gives a batch to an actor, and returns
    the reference of its result. An actor holds `in_flight` batches, and has `limit_s` seconds for one. `task_of` names the
    task of a sample, and `done` says what becomes of samples, `scored` or `written`. Raises MarlRayError if no actor is
    left, if a batch is late or has ended too many actors, and the one that an actor raises.
    """
    import ray
    from ray.exceptions import RayActorError

    waiting = deque((tuple(work[begin : begin + size]), 0) for begin in range(0, len(work), size))
    running: dict[ObjectRef[BatchResult], tuple[str, tuple[Work, ...], int, float]] = {}
    while waiting or running:
        for name, actor in actors.items():
            while waiting and sum(place == name for place, *_ in running.values()) < in_flight:
                batch, attempts = waiting.popleft()
                running[call(actor, batch)] = (name, batch, attempts, time.monotonic() + limit_s(batch))
        if not running:
            missing = sum(len(batch) for batch, _ in waiting)
            raise MarlRayError(f"evaluate: no actor is left; {missing} samples are not {done}")
        patience = max(0.0, min(limit for *_, limit in running.values()) - time.monotonic())
        arrived, _ = ray.wait(list(running), timeout=patience)
        if not arrived:
            name, batch, _, _ = min(running.values(), key=lambda each: each[-1])
            raise MarlRayError(
                f"evaluate: {name}: {len(batch)} samples were not {done} within their {limit_s(batch):.0f} s"
            )
        for reference in arrived:
            name, batch, attempts, _ = running.pop(reference)
            try:
                result = result_of(reference)
            except RayActorError as error:
                actors.pop(name, None)
                if attempts + 1 == MAX_ATTEMPTS:
                    tasks = ", ".join(sorted(set(map(task_of, batch))))
                    raise MarlRayError(
                        f"evaluate: {MAX_ATTEMPTS} actors died before samples of {tasks} were {done}: {one_line(error)}"
                    ) from error
                waiting.append((batch, attempts + 1))
                continue
            yield result


def result_of(reference: "ObjectRef[BatchResult]") -> BatchResult:
    """Return the value of a finished remote call. Raises the MarlRayError that the call raised."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, MarlRayError):
            raise error.cause from error
        raise
