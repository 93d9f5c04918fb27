"""Answers that are kept in a real Redis, which comes, goes, hangs and is full."""

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from clocks import Clock
from redis import Redis
from servers.installed import find, need
from waiting import until

from marl_ray.cluster.local_ray import free_port
from marl_ray.config import CacheConfig
from marl_ray.serving.arms import response_cache as module
from marl_ray.serving.arms.response_cache import RedisCache


class Server:
    """A redis-server of the tests' own, without a file."""

    def __init__(self):
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = [str(find("redis-server")), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        until(lambda: self.process.poll() is not None or self.is_listening(), "redis-server to listen")
        assert self.process.poll() is None, "redis-server has ended"

    def is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def server() -> Iterator[Server]:
    need("Redis")
    server = Server()
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
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)

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
