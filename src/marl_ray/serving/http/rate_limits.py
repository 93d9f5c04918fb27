"""Rate limits: a token bucket per key."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from marl_ray.config import RateLimitConfig

MAX_KEYS = 10_000
"""Maximum number of buckets kept; beyond it the longest unused one is forgotten, which refills it."""
_TOLERANCE_S = 1e-6  # more than the rounding of any clock, less than any token


class RateLimiter:
    """Buckets of `burst` tokens, refilled with `per_s` tokens a second, on one event loop.

    For each bucket only the moment is kept at which it will be full (the generic cell rate algorithm of ITU-T I.371): n
    missing tokens are n / per_s seconds in the future. A bucket whose moment has passed is full and need not be kept.
    """

    def __init__(self, config: RateLimitConfig, clock: Callable[[], float] = time.monotonic):
        """`clock` gives seconds."""
        self._per_s = config.per_s
        self._burst = config.burst
        self._clock = clock
        self._full_at: OrderedDict[str, float] = OrderedDict()  # the most recently used last

    def __len__(self) -> int:
        """Return the number of buckets that are kept."""
        return len(self._full_at)

    def take(self, key: str, cost: int = 1) -> float:
        """Take `cost` tokens and return 0.0 if there are enough.

        Otherwise take nothing and return the seconds until there are (infinity if the bucket is too small).
        """
        if cost > self._burst:
            return math.inf
        now = self._clock()
        full_at = max(self._full_at.get(key, now), now)
        after = full_at + cost / self._per_s
        wait = after - now - self._burst / self._per_s
        allowed = wait <= _TOLERANCE_S
        self._full_at[key] = after if allowed else full_at
        self._full_at.move_to_end(key)
        # Each call adds at most one bucket, so removing one is enough.
        quietest = next(iter(self._full_at))
        if self._full_at[quietest] <= now or len(self._full_at) > MAX_KEYS:
            del self._full_at[quietest]
        return 0.0 if allowed else wait
