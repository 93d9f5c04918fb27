"""The HTTP status of each cause for which serving refuses a request."""

from collections.abc import Mapping

from marl_ray.serving.errors import (
    BusyError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
    UnknownExperimentError,
    WrongKindError,
)
from marl_ray.serving.http.messages import RequestError

STATUSES: Mapping[type[ServingError], int] = {
    InvalidRequestError: 400,
    UnknownExperimentError: 404,
    WrongKindError: 422,
    UnavailableError: 503,
    BusyError: 503,
}


def as_request_error(error: ServingError) -> RequestError:
    """Return the refusal of HTTP for an error of serving; a RequestError is returned as it is."""
    if isinstance(error, RequestError):
        return error
    return RequestError(STATUSES[type(error)], error.field, str(error), error.retry_after_s, error.code)
