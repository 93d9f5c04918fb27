"""Whether arms report equally often, and what could be missing in one of them."""

import numpy as np
import pytest

from marl_ray.experiments.reporting import allowance, unequal_reporting
from marl_ray.experiments.statistics import Summary


def share(n: int, mean: float) -> Summary:
    return Summary(n, mean, mean * (1 - mean))


def test_forty_one_reports_of_410_units_are_an_alarm_and_equal_shares_are_none():
    asked = {"min_outcomes": 50, "units": True}
    assert unequal_reporting(share(410, 0.1), share(410, 1.0), **asked).alarm
    assert unequal_reporting(share(410, 1.0), share(410, 0.1), **asked).alarm
    assert unequal_reporting(share(1_000, 0.95), share(1_000, 1.0), **asked).alarm
    for one, other in ((1.0, 1.0), (0.0, 0.0), (0.02, 0.03), (0.5, 0.52)):
        found = unequal_reporting(share(1_000, one), share(1_000, other), **asked)
        assert not found.alarm and found.p_value > 0.01
    assert not unequal_reporting(share(49, 0.1), share(410, 1.0), **asked).alarm


def test_the_allowance_is_what_the_best_of_the_excess_adds_to_a_normal_mean():
    values = np.sort(np.random.default_rng(0).normal(3.0, 2.0, 200_000))
    many, few = Summary(len(values), values.mean(), values.var(ddof=1)), Summary(900, 0.0, 100.0)
    reports = share(1_000, 0.6), share(1_000, 0.8)
    without_best = values.mean() - values[: int(len(values) * 0.75)].mean()
    assert allowance(few, many, *reports) == pytest.approx(without_best, rel=0.01)
    assert allowance(many, few, *reversed(reports)) == pytest.approx(without_best, rel=0.01)


def test_nothing_is_allowed_for_where_reports_are_equal_or_there_are_none():
    some, none = Summary(50, 1.0, 1.0), Summary(0, float("nan"), 0.0)
    for one, other in ((1.0, 1.0), (0.3, 0.3), (0.0, 0.0)):
        assert allowance(some, some, share(100, one), share(100, other)) == 0.0
    assert allowance(none, some, share(100, 0.0), share(100, 0.5)) == 0.0
    assert allowance(some, some, share(100, 0.49), share(100, 0.5)) > 0.0
