"""The errors of a training that goes nowhere."""

from typing import Any

from marl_ray.errors import MarlRayError


class DivergedError(MarlRayError):
    """The error of a number that is not finite. Training again from the same checkpoint would meet the number again."""


class PassMemoryError(MarlRayError):
    """The error of a worker whose GPU has no room for a pass of `rows` sequences of a `policy`."""

    def __init__(self, message: str, policy: str | None = None, rows: int = 1) -> None:
        super().__init__(message)
        self.policy, self.rows = policy, rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.policy, self.rows)
