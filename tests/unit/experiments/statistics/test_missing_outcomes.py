"""The test that arms report equally often."""

from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.missing_outcomes import judge_reporting


def share(n: int, mean: float) -> Summary:
    return Summary(n, mean, mean * (1 - mean))


def test_forty_one_reports_of_410_units_are_an_alarm_and_equal_shares_are_none():
    rules = {"min_outcomes": 50, "binary": True}
    assert judge_reporting(share(410, 0.1), share(410, 1.0), **rules).alarm
    assert judge_reporting(share(410, 1.0), share(410, 0.1), **rules).alarm
    assert judge_reporting(share(1_000, 0.95), share(1_000, 1.0), **rules).alarm
    for first, other in ((1.0, 1.0), (0.0, 0.0), (0.02, 0.03), (0.5, 0.52)):
        alarm = judge_reporting(share(1_000, first), share(1_000, other), **rules)
        assert not alarm.alarm and alarm.p_value > 0.01
    assert not judge_reporting(share(49, 0.1), share(410, 1.0), **rules).alarm
