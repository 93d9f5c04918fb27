"""Curves are kept for some seconds and read again afterwards."""

import pytest

from marl_ray.serving.ramp_decisions.curve_cache import CurveCache


@pytest.mark.parametrize(
    ("took_s", "kept_s"), [(0.01, 5.0), (0.25, 5.0), (2.0, 40.0)], ids=["five seconds", "both", "twenty times as long"]
)
def test_curves_expire_after_five_seconds_or_twenty_times_as_long_as_they_took(took_s, kept_s):
    now = [100.0]
    cache, made = CurveCache(clock=lambda: now[0]), []

    def make():
        now[0] += took_s
        made.append({"a": [[now[0], 1.0, 0.5, None, None]]})
        return made[-1]

    first = cache.read("exp", make)
    now[0] += kept_s - 0.001
    assert cache.read("exp", make) is first and len(made) == 1
    assert cache.read("other", make) is made[1]  # each experiment has its own
    now[0] += 0.002
    assert cache.read("exp", make) is made[2]


def test_curves_that_could_not_be_read_are_read_again():
    cache = CurveCache()

    def fail():
        raise OSError("the database is gone")

    with pytest.raises(OSError, match=r"^the database is gone$"):
        cache.read("exp", fail)
    assert cache.read("exp", lambda: {"a": []}) == {"a": []}
