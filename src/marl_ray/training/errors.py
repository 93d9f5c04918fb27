"""The errors that end a training, each of which says what was wrong."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from marl_ray.errors import MarlRayError, one_line


class DivergedError(MarlRayError):
    """The error of a number that is not finite. Training again from the same checkpoint would meet the number again."""


class PassMemoryError(MarlRayError):
    """The error of a worker whose GPU has no room for a pass of `rows` sequences of a `policy`."""

    def __init__(self, message: str, policy: str | None = None, rows: int = 1) -> None:
        super().__init__(message)
        self.policy, self.rows = policy, rows

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self.args, self.policy, self.rows)


@contextmanager
def raise_gather_error(where: str) -> Iterator[None]:
    """Raise MarlRayError naming `where` in place of torch's error of a device that has no room.

    This holds within the block, in which workers gather weights for what samples.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MarlRayError(
            f"{where}: out of memory while weights were gathered to sample with; expected more workers, "
            f"model.cpu_offload or resources.engines, whose GPUs are their own ({one_line(error)})"
        ) from error
