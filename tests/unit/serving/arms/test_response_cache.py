"""Kept answers: keys, the replica's own cache, and the choice of one."""

import asyncio
import sys
from collections import OrderedDict

import numpy as np
import pytest
from clocks import Clock
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from marl_ray.config import CacheConfig
from marl_ray.errors import MarlRayError
from marl_ray.serving.arms.response_cache import MemoryCache, RedisCache, cache_key, make_cache

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
                if key in entries and clock.now >= entries[key][1] + 10:
                    del entries[key]
                answer = await cache.get(key)
                if key in entries:
                    assert answer == entries[key][0]
                    entries.move_to_end(key)
                else:
                    assert answer is None

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
    with pytest.raises(
        MarlRayError, match=r"^cache\.url: expected redis://host:port/0, with options that redis\.asyncio has$"
    ) as raised:
        make_cache(CacheConfig(url=url))
    assert "secret" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(MarlRayError, match=r"pip install .*\[redis\]'"):
        make_cache(CacheConfig(url="redis://127.0.0.1:1/0"))
