"""Kept answers: keys, the replica's own cache, and a real Redis that comes and goes."""

import asyncio
import logging
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from redis import Redis

from marl_ray.cluster.local_ray import free_port
from marl_ray.config import CacheConfig
from marl_ray.errors import MarlRayError
from marl_ray.serving.arms import response_cache as module
from marl_ray.serving.arms.response_cache import MemoryCache, RedisCache, cache_key, make_cache

START_S = 20


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# Keys

ARRAYS = npst.arrays(
    st.sampled_from([np.dtype(name) for name in ("<i8", "<f8", "<f4", "|u1", "|b1")]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    elements={"allow_nan": False, "min_value": 0, "max_value": 1},
)
AGENTS = st.dictionaries(st.sampled_from(["a", "b", "ab", "", "a'b", "('a'"]), ARRAYS, max_size=3)


def contents(arrays):
    return {agent: (a.dtype.str, a.shape, a.tobytes()) for agent, a in arrays.items()}


@given(AGENTS, AGENTS, AGENTS, AGENTS)
def test_keys_are_equal_where_the_requests_are(seen, masks, other_seen, other_masks):
    same = (contents(seen), contents(masks)) == (contents(other_seen), contents(other_masks))
    assert (cache_key("d", seen, masks) == cache_key("d", other_seen, other_masks)) is same


def test_each_part_of_a_request_changes_its_key():
    x = np.arange(6, dtype=np.int64)
    keys = [
        cache_key("d", {"a": x}, {}),
        cache_key("e", {"a": x}, {}),
        cache_key("d", {"b": x}, {}),
        cache_key("d", {"a": x + 1}, {}),
        cache_key("d", {"a": x.reshape(2, 3)}, {}),
        cache_key("d", {"a": x.view(np.uint64)}, {}),
        cache_key("d", {"a": x[:3], "b": x[3:]}, {}),
        cache_key("d", {"a": x[:4], "b": x[4:]}, {}),
        cache_key("d", {}, {"a": x}),
        cache_key("d", {"a": x}, {"a": x}),
        cache_key("d", {"a": x[:3]}, {"a": x[3:]}),
    ]
    assert len({*keys}) == len(keys)
    assert {len(key) for key in keys} == {32}


def test_order_of_agents_and_layout_in_memory_do_not_change_a_key():
    x, y = np.arange(6.0).reshape(2, 3), np.arange(3)
    key = cache_key("d", {"a": x, "b": y}, {})
    assert cache_key("d", {"b": y, "a": np.asfortranarray(x)}, {}) == key
    assert cache_key("d", {"a": np.repeat(x, 2, axis=1)[:, ::2], "b": y}, {}) == key


# The replica's own


@given(st.lists(st.tuples(st.sampled_from(["get", "put", "wait"]), st.integers(0, 5)), max_size=60))
def test_memory_keeps_the_last_used_answers_for_their_time(steps):
    clock = Clock()
    cache = MemoryCache(CacheConfig(entries=3, ttl_s=10), clock)
    entries: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    async def body():
        for number, (step, k) in enumerate(steps):
            key = bytes([k])
            if step == "wait":
                clock.now += k
            elif step == "put":
                await cache.put(key, value := str(number).encode())
                entries[key] = value, clock.now
                entries.move_to_end(key)
                while len(entries) > 3:
                    entries.popitem(last=False)
            else:
                value, since = entries.get(key, (None, 0.0))
                if value is not None and clock.now >= since + 10:
                    value = None
                    del entries[key]
                assert await cache.get(key) == value
                if value is not None:
                    entries.move_to_end(key)

    asyncio.run(body())


async def test_a_get_counts_as_use():
    cache = MemoryCache(CacheConfig(entries=2), Clock())
    await cache.put(b"a", b"1")
    await cache.put(b"b", b"2")
    await cache.get(b"a")
    await cache.put(b"c", b"3")
    assert [await cache.get(key) for key in (b"a", b"b", b"c")] == [b"1", None, b"3"]


def test_the_config_chooses_the_cache():
    assert make_cache(None) is None
    assert isinstance(make_cache(CacheConfig()), MemoryCache)
    assert isinstance(make_cache(CacheConfig(url="redis://127.0.0.1:1/0")), RedisCache)


@pytest.mark.parametrize("url", ["redis://:secret@h:port/0", "redis://:secret@h/0?colour=red", "redis://h?db=secret"])
def test_a_wrong_url_is_one_line_without_the_password(url):
    with pytest.raises(MarlRayError, match=r"^cache\.url: expected redis://") as raised:
        make_cache(CacheConfig(url=url))
    assert "secret" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(MarlRayError, match=r"pip install .*\[redis\]'"):
        make_cache(CacheConfig(url="redis://127.0.0.1:1/0"))


# Redis


class Server:
    """A redis-server of the tests' own, without a file."""

    def __init__(self, binary: str):
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._binary = binary
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen([self._binary, *options], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        until = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError as error:
                assert self.process.poll() is None and time.monotonic() < until, f"redis-server: {error}"
                time.sleep(0.01)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(START_S)


@pytest.fixture
def server() -> Iterator[Server]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server here: on Debian, as root, tests/runner/need_servers.sh installs it")
    server = Server(binary)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A busy machine must not look like a slow Redis; the tests in which Redis is slow take the real deadline."""
    monkeypatch.setattr(module, "DEADLINE_S", 5.0)


def with_redis(url: str, body, clock=time.monotonic, **more):
    async def run():
        cache = RedisCache(CacheConfig(url=url, **more), clock)
        try:
            return await body(cache)
        finally:
            await cache.close()

    return asyncio.run(run())


def test_redis_keeps_any_bytes_for_other_replicas_too(server, caplog):
    values = {bytes([i]) * 32: value for i, value in enumerate([b"", b"\x00\xff\r\n$3\r\n", b"x" * 100_000])}

    async def fill(cache):
        for key, value in values.items():
            await cache.put(key, value)

    async def look(cache):
        return {key: await cache.get(key) for key in values}, await cache.get(b"other")

    with_redis(server.url, fill)
    assert with_redis(server.url, look) == (values, None)
    assert not caplog.messages


def test_redis_keys_have_the_prefix_and_the_time_to_live(server):
    async def body(cache):
        await cache.put(b"\x01key", b"value")
        with Redis.from_url(server.url) as redis:
            return redis.keys("*"), redis.pttl(b"marl-ray:\x01key")

    keys, ttl_ms = with_redis(server.url, body, ttl_s=90)
    assert keys == [b"marl-ray:\x01key"]
    assert 0 < ttl_ms <= 90_000


def test_concurrent_answers_do_not_get_mixed_up_even_when_clients_leave(server):
    async def body(cache):
        await asyncio.gather(*(cache.put(b"%d" % i, b"value %d" % i) for i in range(40)))
        for turn in range(20):
            gets = [asyncio.create_task(cache.get(b"%d" % i)) for i in range(40)]
            for _ in range(turn):
                await asyncio.sleep(0)
            for leaver in gets[::3]:
                leaver.cancel()
            answers = await asyncio.gather(*gets, return_exceptions=True)
            for i, answer in enumerate(answers):
                assert answer == b"value %d" % i or (i % 3 == 0 and isinstance(answer, asyncio.CancelledError))
        return cache.under_way

    assert with_redis(server.url, body) == 0


def test_more_requests_than_connections_go_without_the_cache(server, monkeypatch, caplog):
    monkeypatch.setattr(module, "CONNECTIONS", 4)

    async def body(cache):
        await cache.put(b"k", b"v")
        return await asyncio.gather(*(cache.get(b"k") for _ in range(10))), await cache.get(b"k")

    assert with_redis(server.url, body) == ([b"v"] * 4 + [None] * 6, b"v")
    assert not caplog.messages


def test_redis_that_is_restarted_is_used_again_after_a_second(server, caplog):
    clock = Clock()

    async def body(cache):
        await asyncio.gather(*(cache.put(b"k", b"v") for _ in range(8)))  # several connections that will break
        server.stop()
        assert await asyncio.gather(*(cache.get(b"k") for _ in range(8))) == [None] * 8
        clock.now += 1.5
        assert await cache.get(b"k") is None  # still away
        server.start()
        await cache.put(b"k", b"new")
        assert await cache.get(b"k") is None  # left alone
        clock.now += 1.5
        await cache.put(b"k", b"new")
        return await asyncio.gather(*(cache.get(b"k") for _ in range(8)))

    assert with_redis(server.url, body, clock) == [b"new"] * 8
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    assert caplog.messages[0].startswith(f"cache: going on without redis://127.0.0.1:{server.port}: ")


def test_each_outage_has_its_line(server, caplog):
    clock = Clock()

    async def body(cache):
        for _ in range(2):
            clock.now += 61
            await cache.put(b"k", b"v")
            assert await cache.get(b"k") == b"v"
            server.stop()
            for _ in range(3):
                clock.now += 1.5
                assert await cache.get(b"k") is None
            server.start()

    with_redis(server.url, body, clock)
    assert len(caplog.messages) == 2


def test_a_full_redis_is_left_alone_without_a_line_each_second(server, caplog):
    clock = Clock()

    async def body(cache):
        await cache.put(b"k", b"v")
        with Redis.from_url(server.url) as redis:
            redis.config_set("maxmemory", "1")
        keys = []
        for _ in range(5):
            await cache.put(b"other", b"v")
            clock.now += 1.5
            keys.append(await cache.get(b"k"))
        return keys

    assert with_redis(server.url, body, clock) == [b"v"] * 5
    assert len(caplog.messages) == 1
    assert "maxmemory" in caplog.messages[0]


def test_redis_that_hangs_is_a_miss(server, monkeypatch, caplog):
    clock = Clock()

    async def body(cache):
        await cache.put(b"k", b"v")
        server.process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(module, "DEADLINE_S", 0.05)
        assert await asyncio.gather(*(cache.get(b"k") for _ in range(8))) == [None] * 8
        server.process.send_signal(signal.SIGCONT)
        monkeypatch.setattr(module, "DEADLINE_S", 5.0)
        clock.now += 1.5
        return await cache.get(b"k")

    assert with_redis(server.url, body, clock) == b"v"
    assert len(caplog.messages) == 1


async def test_after_a_failure_only_one_request_a_second_asks_again(monkeypatch, caplog):
    monkeypatch.setattr(module, "DEADLINE_S", 0.2)
    clock, came = Clock(), []

    async def silent(reader, writer):
        came.append(True)
        try:
            await reader.read()
        finally:
            writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        cache = RedisCache(CacheConfig(url=f"redis://127.0.0.1:{port}/0"), clock)
        questions = []
        for _ in range(4):
            for _ in range(5):
                assert await cache.get(b"k") is None
            await asyncio.gather(*(cache.get(b"k") for _ in range(20)))
            questions.append(len(came))
            clock.now += 1.5
        before = len(came)
        await asyncio.gather(*(cache.get(b"k") for _ in range(20)))  # all at once, when it may be asked again
        questions.append(len(came) - before)
        await cache.close()
    assert questions == [1, 2, 3, 4, 1]
    assert len(caplog.messages) == 1


def test_a_refusal_by_redis_is_a_miss_and_the_password_stays_out_of_the_log(server, caplog):
    async def body(cache):
        await cache.put(b"k", b"v")
        return await cache.get(b"k")

    assert with_redis(server.url.replace("://", "://user:secret@"), body) is None
    assert len(caplog.messages) == 1
    assert "secret" not in caplog.text
