"""A route: an operation, and the function that answers it."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from marl_ray.serving.http.messages import Request, RequestError, Response, Stream
from marl_ray.serving.service import Service

Handler = Callable[[Service, Request], Awaitable[Response | Stream]]


class Route(NamedTuple):
    """One operation: `{name}` in the template stands for one part of a path."""

    method: str
    template: str
    handler: Handler
    operation: str | None = None
    """`operationId` in the OpenAPI document, which finds its description there; None of a page for people."""
    is_slow: bool = False
    """True if the operation fetches bundles, so that it gets a longer deadline."""
    error_body: Callable[[RequestError], bytes] = RequestError.body
    """The function that writes an error's body."""
