"""The errors of an arm that does not answer a request; each names the pass or call that failed."""

import itertools
import secrets

from marl_ray.serving.errors import BusyError

_numbers = itertools.count(secrets.randbits(62))


def new_pass_number() -> int:
    """Return a new number for a pass or call. Two processes draw the same number with a probability of about 1e-18."""
    return next(_numbers)


class ArmError(Exception):
    """The arm failed on a request.

    `pass_number` is the number of the pass or call that failed: all requests in it fail together and count
    as one failure.
    """

    def __init__(self, message: str, pass_number: int):
        super().__init__(message, pass_number)  # both, because the error crosses processes by pickle
        self.pass_number = pass_number

    def __str__(self) -> str:
        return str(self.args[0])


class NotFiniteError(ArmError):
    """The arm computed log-probabilities that are not finite.

    The cause is this input, or the weights are broken.
    """


class LostError(ArmError):
    """No answer came back, for which the input need not be the cause.

    The arm's process or the connection ended, or the deadline passed.
    """


def busy_error(message: str) -> BusyError:
    """Return the error for a request that the arm has no room for, which does not count as a failure of the arm."""
    return BusyError(f"the arm is busy: {message}")
