"""The cache of answers to greedy acts, in this process or in Redis. Values are opaque bytes."""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from typing_extensions import override

from marl_ray.config import CacheConfig
from marl_ray.errors import MarlRayError, install_hint, one_line

if TYPE_CHECKING:
    from redis.asyncio import Redis

DEADLINE_S = 0.05
"""Seconds that one get or put in Redis may take, including the connection."""
AWAY_S = 1.0
"""Seconds without requests to Redis after a failure, so that few requests pay the deadline."""
CLOSE_S = 1.0
"""Seconds that closing the connection may take; the process ends anyway."""
COMPLAINT_S = 60.0
"""Minimum seconds between two log lines: a full Redis answers reads and fails again with each put."""
MAX_CONNECTIONS = 64
"""Maximum number of connections to Redis; further requests at the same moment skip the cache."""
KEY_PREFIX = b"marl-ray:"
"""The prefix of the keys in Redis."""
_log = logging.getLogger(__name__)


class ResponseCache(Protocol):
    """Answers by key. A key that was put may be missing at any time."""

    async def get(self, key: bytes) -> bytes | None:
        """Return the answer of a key, None if the cache does not have it; raises nothing."""

    async def put(self, key: bytes, value: bytes) -> None:
        """Store an answer under a key for the configured time to live; raises nothing."""

    async def close(self) -> None:
        """Release what the cache holds in this process; raises nothing."""


def make_cache(config: CacheConfig | None) -> ResponseCache | None:
    """Return the cache that the config asks for; None if it asks for none.

    Raises MarlRayError where Redis is asked for and its package is missing.
    """
    if config is None:
        return None
    return MemoryCache(config) if config.url == "memory:" else RedisCache(config)


def cache_key(digest: str, observations: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> bytes:
    """Return 32 bytes that differ if the bundle or what its agents observe differs.

    The bytes depend on the bundle's digest and on agents, dtypes, shapes and numbers; the agents' order does not
    matter. Takes arrays of numbers and flags only.
    """
    arrays = [*_sort_agents(observations), None, *_sort_agents(masks)]
    # The quoted names and the shapes say where each array's bytes begin and end, and the length where they do.
    head = repr((digest, [a and (a[0], a[1].dtype.str, a[1].shape) for a in arrays])).encode()
    return hashlib.blake2b(
        b"".join([len(head).to_bytes(8, "big"), head, *(a[1].tobytes() for a in arrays if a)]), digest_size=32
    ).digest()


def _sort_agents(arrays: Mapping[str, np.ndarray]) -> list[tuple[str, np.ndarray]]:
    return [(agent, arrays[agent]) for agent in sorted(arrays)]


class MemoryCache(ResponseCache):
    """The replica's own cache.

    It drops the least recently used answer first, and each answer after its time to live.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float] = time.monotonic):
        """`clock` gives seconds."""
        self._config = config
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()  # the most recently used last

    @override
    async def get(self, key: bytes) -> bytes | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        until, value = entry
        if self._clock() >= until:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return value

    @override
    async def put(self, key: bytes, value: bytes) -> None:
        self._entries[key] = self._clock() + self._config.ttl_s, value
        self._entries.move_to_end(key)
        if len(self._entries) > self._config.entries:
            self._entries.popitem(last=False)

    @override
    async def close(self) -> None:
        self._entries.clear()


class RedisCache(ResponseCache):
    """The cache that all replicas share.

    If Redis is away, slow or wrong, the cache is empty and logs one line; it raises nothing.
    """

    def __init__(self, config: CacheConfig, clock: Callable[[], float] = time.monotonic):
        """Connect at the first use. `clock` gives seconds. Raises MarlRayError if the URL or the package is wrong."""
        self._redis, self._address = _connect(config.url)
        self._ttl_ms = max(1, round(config.ttl_s * 1000))
        self._clock = clock
        self._is_away = False
        self._ask_from = 0.0
        self._complain_from = 0.0
        self.under_way = 0
        """Number of requests to Redis that have not been answered yet."""

    @override
    async def get(self, key: bytes) -> bytes | None:
        stored: bytes | None = await self._ask(lambda: self._redis.get(KEY_PREFIX + key))
        return stored

    async def put(self, key: bytes, value: bytes) -> None:
        """Store an answer in at most the deadline, as `get` does; the caller need not wait for it."""
        await self._ask(lambda: self._redis.set(KEY_PREFIX + key, value, px=self._ttl_ms))

    @override
    async def close(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._redis.aclose()
        except Exception as error:
            _log.warning("cache: %s was not closed: %s", self._address, one_line(error))

    async def _ask(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Return Redis' answer, or None if it fails, is late, or is not asked because it failed lately."""
        if self._clock() < self._ask_from or self.under_way >= MAX_CONNECTIONS:
            return None
        # Only the first request after the pause asks Redis; the others skip the cache until it answers.
        is_probe = self._is_away
        if is_probe:
            self._ask_from = self._clock() + AWAY_S
        self.under_way += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer = await command()
        except Exception as error:  # no failure here may become a client's error
            now = self._clock()
            self._ask_from = now + AWAY_S
            if not self._is_away and now >= self._complain_from:
                self._complain_from = now + COMPLAINT_S
                _log.warning("cache: going on without %s: %s", self._address, one_line(error))
            self._is_away = True
            return None
        finally:
            self.under_way -= 1
        if is_probe:
            self._is_away = False
            self._ask_from = 0.0
        return answer


def _connect(url: str) -> "tuple[Redis, str]":
    """Return a client that has not connected yet, and the server's address without its password."""
    try:
        from redis.asyncio import ConnectionPool, Redis
        from redis.asyncio.connection import parse_url
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise MarlRayError(f"cache.url: Redis needs its package; {install_hint('redis')}") from error
    own_options = {
        "decode_responses": False,
        "max_connections": MAX_CONNECTIONS,
        "protocol": 2,  # one round trip less per connection, and all that GET and SET need
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": DEADLINE_S,
        # With a timeout redis-py writes through `asyncio.wait_for`, which loses cancellations on Python 3.11, also
        # those of `_ask`.
        "socket_timeout": None,
    }
    try:
        options: dict[str, Any] = {**parse_url(url), **own_options}
        pool = ConnectionPool(**options)
        pool.make_connection()  # does not connect, but checks the options
    except (TypeError, ValueError):  # the error is not quoted, because it could contain a password
        raise MarlRayError("cache.url: expected redis://host:port/0, with options that redis.asyncio has") from None
    return Redis.from_pool(pool), f"redis://{options.get('host', 'localhost')}:{options.get('port', 6379)}"
