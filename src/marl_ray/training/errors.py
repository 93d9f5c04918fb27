"""The errors of a training that goes nowhere."""

from marl_ray.errors import MarlRayError


class Diverged(MarlRayError):
    """The error of a number that is not finite. Training again from the same checkpoint would meet the number again."""


class OutOfMemory(MarlRayError):
    """The error of a worker whose GPU has no room for a pass."""
