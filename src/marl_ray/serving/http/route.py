"""A route: an operation, and the function that answers it."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from marl_ray.serving.http.protocol import Request, RequestError, Response, Stream

Handler = Callable[[Any, Request], Awaitable[Response | Stream]]
"""Its first argument is the gateway's `Service`, of which nothing in this folder knows."""


class Route(NamedTuple):
    """One operation: `{name}` in the template stands for one part of a path."""

    method: str
    template: str
    handler: Handler
    loads: bool = False
    """Fetches bundles, which may take longer than requests may."""
    problem: Callable[[RequestError], bytes] = RequestError.body
    """The function that writes an error's body."""
