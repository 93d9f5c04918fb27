"""The errors of an arm that did not answer a request; each names the pass or call that failed."""

import itertools
import secrets

from marl_ray.serving.http.protocol import RequestError

RETRY_AFTER_S = 1.0
"""Seconds that clients of a busy arm are asked to wait."""
_numbers = itertools.count(secrets.randbits(62))


def new_pass() -> int:
    """The number of a pass or call. Numbers of other processes differ, but for a chance of about 1e-18 each."""
    return next(_numbers)


class ArmError(Exception):
    """The arm failed on a request. `pass_number` is the number of the pass or call that failed: requests that share one fail
    together, and count once."""

    def __init__(self, message: str, pass_number: int):
        super().__init__(message, pass_number)  # both, because the error crosses processes by pickle
        self.pass_number = pass_number

    def __str__(self) -> str:
        return str(self.args[0])


class NotFiniteError(ArmError):
    """The arm computed log-probabilities that are not finite: of this input, or because its weights are broken."""


class LostError(ArmError):
    """No answer came back: the arm's process or the connection to it ended, or the deadline passed. It says nothing about
    the input."""


def busy(message: str) -> RequestError:
    """The arm has no time for the request, which is no failure of it."""
    return RequestError(503, None, f"the arm is busy: {message}", retry_after_s=RETRY_AFTER_S)
