"""The errors of a request that serving refuses, a class for each cause.

They know nothing of HTTP; `http.statuses` says which status answers each of them.
"""

from marl_ray.errors import MarlRayError

RETRY_AFTER_S = 1.0
"""Seconds after which a client of a busy arm or database may try again: longer than a pass or a read usually takes."""


class ServingError(MarlRayError):
    """A refusal of a request, in one line. No arm is at fault, so no other arm is to be tried.

    `field` is the invalid field, None for the request as a whole. `retry_after_s` is the number of seconds after which
    the client may try again, None if that would not help. `code` is the reason by its name in OpenAI's API, where the
    class alone does not say it.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        retry_after_s: float | None = None,
        code: str | None = None,
    ):
        super().__init__(message)  # the message alone, because pickle makes the error of it, and sets the rest after
        self.field = field
        self.retry_after_s = retry_after_s
        self.code = code


class InvalidRequestError(ServingError):
    """A field of the request is missing or wrong."""


class UnknownExperimentError(ServingError):
    """The request names an experiment or endpoint that the gateway does not have."""


class WrongKindError(ServingError):
    """The experiment's policies are of the other kind: language models or actor-critics."""


class UnavailableError(ServingError):
    """Nothing can answer the request now: no arm is loaded, or none answers."""

    def __init__(self, message: str, retry_after_s: float = RETRY_AFTER_S):
        super().__init__(message, retry_after_s=retry_after_s)


class BusyError(UnavailableError):
    """An arm or a queue has no room for the request."""
