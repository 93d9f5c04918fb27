"""Token buckets, against one that is filled step by step."""

import math
from fractions import Fraction

from clocks import Clock
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.config import RateLimitConfig
from marl_ray.serving.http import rate_limits
from marl_ray.serving.http.rate_limits import RateLimiter


def test_a_burst_passes_and_then_the_rate():
    clock = Clock()
    limiter = RateLimiter(RateLimitConfig(per_s=4, burst=3), clock)
    assert [limiter.take("a") for _ in range(4)] == [0, 0, 0, 0.25]
    clock.now += 0.25
    assert [limiter.take("a") for _ in range(2)] == [0, 0.25]


def test_a_refusal_takes_nothing():
    clock = Clock()
    limiter = RateLimiter(RateLimitConfig(per_s=1, burst=2), clock)
    limiter.take("a", 2)
    assert [limiter.take("a") for _ in range(50)] == [1.0] * 50
    assert limiter.take("a", 2) == 2.0
    clock.now += 1
    assert limiter.take("a") == 0


def test_keys_do_not_share_a_bucket():
    limiter = RateLimiter(RateLimitConfig(per_s=1, burst=1), Clock())
    assert [limiter.take(key) for key in "aab"] == [0, 1, 0]


def test_a_cost_above_the_bucket_is_never_allowed():
    limiter = RateLimiter(RateLimitConfig(per_s=1, burst=5), Clock())
    assert limiter.take("a", 6) == math.inf
    assert limiter.take("a", 5) == 0


def test_full_buckets_are_forgotten():
    clock = Clock()
    limiter = RateLimiter(RateLimitConfig(per_s=1, burst=10), clock)
    for i in range(500):
        limiter.take(f"old-{i}")
    assert len(limiter) == 500
    clock.now += 1
    for i in range(500):
        limiter.take(f"new-{i}")
    assert len(limiter) == 500
    clock.now += 1
    for _ in range(600):
        limiter.take("one")
    assert len(limiter) == 1


def test_memory_is_bounded_and_a_key_that_keeps_asking_is_not_forgotten(monkeypatch):
    monkeypatch.setattr(rate_limits, "MAX_KEYS", 50)
    limiter = RateLimiter(RateLimitConfig(per_s=1, burst=1), Clock())
    assert limiter.take("greedy") == 0
    for i in range(500):
        assert limiter.take(f"k{i}") == 0
        assert limiter.take("greedy") == 1.0
        assert len(limiter) <= 50


def test_who_waits_as_told_is_allowed_whatever_the_rounding():
    clock = Clock(1e6 + 0.1)  # a machine that is up for long
    limiter = RateLimiter(RateLimitConfig(per_s=3, burst=2), clock)
    for _ in range(500):
        while (wait := limiter.take("a")) == 0:
            pass
        clock.now += wait
        assert limiter.take("a") == 0


@given(
    per_s=st.sampled_from([Fraction(1, 10), Fraction(1, 3), Fraction(1), Fraction(7), Fraction(1000)]),
    burst=st.integers(1, 12),
    steps=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 14), st.booleans()), max_size=40),
)
def test_takes_equal_those_of_an_exact_bucket(per_s, burst, steps):
    """The reference counts in milliseconds and fractions; cases within rounding of the border are left to it."""
    clock = Clock()
    limiter = RateLimiter(RateLimitConfig(per_s=float(per_s), burst=burst), clock)
    tokens = Fraction(burst)
    now = Fraction(clock.now)
    for pause_ms, cost, waits_long_enough in steps:
        wait = limiter.take("a", cost)
        if cost > burst:
            assert wait == math.inf
            continue
        exact = max(Fraction(0), (cost - tokens) / per_s)
        assert abs(wait - exact) < 1e-5
        if wait == 0:
            tokens = max(tokens - cost, Fraction(0))
        elif waits_long_enough:
            clock.now += wait
            assert limiter.take("a", cost) == 0, "refused after the time it was told"
            tokens = max(tokens + (Fraction(clock.now) - now) * per_s - cost, Fraction(0))
            now = Fraction(clock.now)
        clock.now += pause_ms / 1000
        tokens = min(Fraction(burst), tokens + (Fraction(clock.now) - now) * per_s)
        now = Fraction(clock.now)
