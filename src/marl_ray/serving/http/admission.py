"""Admission: API keys, their scopes and their rates decide which requests are accepted."""

import asyncio

from marl_ray.config import GatewayConfig
from marl_ray.serving.http.keys import Keys, Permission
from marl_ray.serving.http.messages import Request, RequestError
from marl_ray.serving.http.rate_limits import RateLimiter

REFUSAL_S = 1.0
"""Seconds that a reader above its rate waits for the refusal."""


class Admission:
    """The keys of a gateway and their current use, on one event loop."""

    def __init__(self, config: GatewayConfig):
        """Raise MarlRayError if the file of keys cannot be read."""
        self.keys = Keys(config.api_keys)
        self._limiter = RateLimiter(config.rate_limit) if config.rate_limit else None
        self._read_limiter = RateLimiter(config.read_limit) if config.read_limit else None

    def admit(self, request: Request, permission: Permission) -> str:
        """Return the name of the request's key.

        Raises RequestError 401 or 403 without a key that may do this, 429 if the key is above its rate.
        """
        key = self.keys.check(request, permission)
        self.limit(key, 1)
        return key

    async def admit_reader(self, request: Request, *also: Permission) -> str:
        """Admit a request to read, with the scope `read` or one of `also`.

        A refusal for the rate is delayed, because clients without pause would otherwise cause thousands of refusals a
        second, which cost as much as answers. Raises RequestError 401, 403 or 429.
        """
        key = self.keys.check(request, "read", *also)
        if self._read_limiter is not None and (wait := self._read_limiter.take(key)) > 0:
            await asyncio.sleep(REFUSAL_S)
            raise RequestError(429, None, f"more readings of {key!r} than read_limit allows", retry_after_s=wait)
        return key

    def limit(self, key: str, cost: int) -> None:
        """Count `cost` requests of a key. Raises RequestError 429 if the key is above its rate."""
        if self._limiter is not None and (wait := self._limiter.take(key, cost)) > 0:
            raise RequestError(429, None, f"more requests of {key!r} than its rate_limit allows", retry_after_s=wait)

    def forced_arm(self, request: Request) -> str | None:
        """Return the arm that a tester asks for by the header `x-arm`; None without the header.

        Raises RequestError unless the key has the scope `admin`.
        """
        arm = request.header(b"x-arm")
        if arm is not None:
            self.keys.check(request, "admin")
        return arm
