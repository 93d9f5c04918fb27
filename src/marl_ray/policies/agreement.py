"""One decision of all workers: where one fails, all raise its error at once."""

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from marl_ray.errors import MarlRayError, describe_error

Agreed = TypeVar("Agreed")
Sent = TypeVar("Sent")


class WorkerFailure(NamedTuple):
    """The message that a worker sends in place of its value."""

    rank: int
    error: MarlRayError


def all_gather_values(value: Sent, group: dist.ProcessGroup | None = None) -> list[Sent]:
    """Return every worker's plain value, ordered by rank, on every worker of the group (None: of all).

    Raises the error of a worker that has failed in a block of `run_on_all_workers` instead of taking part, on all workers.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    failures = [each for each in values if isinstance(each, WorkerFailure)]
    if failures:
        raise _shared_error(failures, everywhere=len(failures) == len(values))
    return values


def run_on_all_workers(make: Callable[[], Agreed], group: dist.ProcessGroup | None = None) -> Agreed:
    """Call `make` on every worker of the group (None: of all), and raise on all what it raises on any.

    All raise the first error, in which `shared` is true; the line names the worker, unless all fail alike. Within
    `make` workers may exchange values by `all_gather_values` over the same group, equally often. A worker that fails
    then answers the exchange for which the others wait.
    """
    try:
        made = make()
    except Exception as error:
        if isinstance(error, MarlRayError) and error.shared:
            raise
        reported = error if isinstance(error, MarlRayError) else MarlRayError(describe_error(error))
        try:
            all_gather_values(WorkerFailure(dist.get_rank(group), reported), group)
        except MarlRayError as shared:
            # A defect that all workers meet keeps its traceback.
            raise (error if reported is not error and str(shared) == str(reported) else shared) from error
        raise
    all_gather_values(None, group)
    return made


def _shared_error(failures: list[WorkerFailure], everywhere: bool) -> MarlRayError:
    first = failures[0]
    error = copy(first.error)
    if not everywhere or len({str(failure.error) for failure in failures}) > 1:
        error.args = (f"worker {first.rank}: {error}", *error.args[1:])
    error.shared = True
    return error
