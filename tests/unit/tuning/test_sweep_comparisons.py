"""Curves of a sweep's trials, how the trials compare, and the drawings of them."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_runs.sweeps import ToySweep

from marl_ray.config.sweep import MetricConfig
from marl_ray.evaluation.statistics import iqm, stratified_bootstrap
from marl_ray.tuning.reporting.compare import (
    Curve,
    curve_of,
    differ_by_rank_sum,
    difference,
    end_of,
    importances,
    improvement,
    interval_bands,
    probability_of_improvement,
    winner_certainty,
)
from marl_ray.tuning.reporting.figures import draw_curve_chart, draw_parallel_axes, format_number, strokes, ticks

RETURN = MetricConfig(name="return", window=2)


def rows_of(*columns: list[float | None], exploits: list[int] | None = None) -> list[dict[str, float]]:
    """Rows 100 steps apart; a column for each seed."""
    rows = []
    for k, values in enumerate(zip(*columns, strict=True)):
        row: dict[str, float] = {"steps": 100 * (k + 1), "exploits": exploits[k] if exploits else 0}
        rows.append(row | {f"seed-{s}/return": v for s, v in enumerate(values) if v is not None})
    return rows


def test_a_curve_begins_where_all_seeds_have_a_value_and_is_smoothed_by_the_metrics_window():
    curve = curve_of(rows_of([1, 2, 3, 4], [None, 6, 8, math.nan]), [0, 1], RETURN)
    assert curve is not None
    assert curve.steps.tolist() == [200, 300, 400]
    assert curve.seeds.tolist() == [[1.5, 2.5, 3.5], [6, 7, 7]]
    assert curve_of(rows_of([None, None]), [0], RETURN) is None
    assert curve_of([], [0], RETURN) is None


def test_a_curve_has_points_where_something_was_reported_and_none_between():
    curve = curve_of(rows_of([1, None, None, 4], [5, None, None, 8]), [0, 1], RETURN)
    assert curve is not None
    assert len(curve.steps) == 2 and curve.seeds[:, 0].tolist() == [1, 5]


def test_a_takeover_begins_a_new_window_and_steps_never_go_back():
    rows = rows_of([1, 1, 1, 9, 9], exploits=[0, 0, 0, 1, 1])
    for row in rows[3:]:
        row["steps"] -= 150
    curve = curve_of(rows, [0], RETURN)
    assert curve is not None
    assert curve.steps.tolist() == [100, 200, 250, 350]
    assert curve.seeds.tolist() == [[1, 1, 9, 9]]
    assert curve.at(200).tolist() == [1] and curve.at(1e9).tolist() == [9] and curve.at(0).tolist() == [1]


def test_bands_are_those_of_the_stratified_bootstrap():
    values = np.random.default_rng(0).normal(size=(8, 3)).cumsum(1)
    middle, low, high = interval_bands(Curve(np.arange(3), values))
    for k in range(3):
        expected = stratified_bootstrap(values[:, k : k + 1])
        assert middle[k] == pytest.approx(iqm(values[:, k]))
        assert [low[k], high[k]] == pytest.approx([expected.low, expected.high], abs=0.06 * np.ptp(values[:, k]))
    single = end_of(Curve(np.array([5.0]), np.array([[2.0]])))
    assert single == (2.0, 2.0, 2.0)


SCORES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=6).map(np.array)


@given(SCORES, SCORES)
@settings(max_examples=40)
def test_the_probability_of_improvement_counts_pairs(treated, control):
    probability = probability_of_improvement(treated, control)
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in treated for b in control]
    assert probability.value == pytest.approx(sum(pairs) / len(pairs))
    assert 0 <= probability.low <= probability.high <= 1
    assert probability_of_improvement(control, treated).value == pytest.approx(1 - probability.value)


def test_trials_are_compared_where_both_have_been_and_in_the_metrics_own_direction():
    long = Curve(np.array([100.0, 200.0, 300.0]), np.array([[1.0, 2.0, 9.0], [1.0, 2.0, 9.0]]))
    short = Curve(np.array([100.0, 200.0]), np.array([[0.0, 3.0], [0.0, 4.0]]))
    assert improvement(short, long, RETURN).value == 1.0
    assert improvement(short, long, MetricConfig(mode="min")).value == 0.0


def test_two_are_told_apart_by_four_seeds_never_by_three():
    def level(value: float, seeds: int) -> Curve:
        return Curve(np.array([1.0]), value + 0.01 * np.arange(seeds)[:, None])

    assert not differ_by_rank_sum(level(5.0, 3), level(0.0, 3))
    assert differ_by_rank_sum(level(5.0, 4), level(0.0, 4))
    assert not differ_by_rank_sum(level(5.0, 1), level(0.0, 1))
    same = Curve(np.array([1.0]), np.ones((5, 1)))
    assert not differ_by_rank_sum(same, same)


def test_a_difference_is_that_of_the_interquartile_means():
    gap = difference(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 1.0, 1.0, 9.0]))
    assert gap.value == pytest.approx(0.5) and gap.low < 0 < gap.high
    assert difference(np.ones(1), np.zeros(1)) == (1.0, 1.0, 1.0)


def test_a_winner_says_from_whom_it_cannot_be_told():
    def ends(*values: float) -> Curve:
        return Curve(np.array([100.0, 5000.0]), np.array([[0.0, value] for value in values]))

    winner, close, far = ends(5, 6, 7, 8, 9), ends(4, 6, 7, 8, 9), ends(0, 1, 2, 3, 4)
    assert winner_certainty([("0000", winner)], RETURN) == ""
    line = winner_certainty([("0000", winner), ("0003", far), ("0001", close)], RETURN)
    assert re.fullmatch(
        r"not distinguishable from trial 0001: difference 0 \(-[\d.]+ to [\d.]+\) at 5,000 steps, 5 seeds, "
        r"probability of improvement 0\.52",
        line,
    )
    assert "trial 0001 and 1 more: " in winner_certainty([("0000", winner), ("0001", close), ("0002", close)], RETURN)
    sure = winner_certainty([("0000", winner), ("0003", far)], RETURN)
    assert sure.startswith("distinguishable from trial 0003: difference 5 (")
    three = winner_certainty([("0000", ends(7, 8, 9)), ("0001", ends(0, 1, 2))], RETURN)
    assert three.startswith("not distinguishable") and "3 seeds (the test takes 4), " in three
    single = winner_certainty([("0000", ends(7)), ("0001", ends(6.5))], RETURN)
    assert single == "not distinguishable from trial 0001: difference 0.5 at 5,000 steps, 1 seed (the test takes 4)"


def test_the_key_that_decides_is_the_important_one(tmp_path):
    space = ToySweep(tmp_path).config.space
    rng = np.random.default_rng(0)
    values = [
        {"algorithm": "ippo", "hyper.lr": float(10 ** rng.uniform(-4, -2)), "hyper.entropy_coef": rng.uniform(0, 0.05)}
        for _ in range(40)
    ]
    weights = importances(
        space, [(values_tried, -abs(math.log10(values_tried["hyper.lr"]) + 3)) for values_tried in values]
    )
    assert next(iter(weights)) == "hyper.lr"
    assert weights["hyper.lr"] > 0.6
    assert "algorithm" not in weights  # it did not vary
    assert importances(space, [(row, 1.0) for row in values]) == {}
    assert importances(space, [(row, k) for k, row in enumerate(values[:3])]) == {}


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e6), st.integers(1, 12))
def test_ticks_are_few_and_inside(low, size, max_ticks):
    numbers = ticks(low, low + size, max_ticks)
    assert len(numbers) <= max_ticks + 1
    assert all(low - 1e-6 * size <= value <= low + size * (1 + 1e-6) for value in numbers)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-15, "0"),
        (50_000, "50k"),
        (2_500, "2.5k"),
        (2_512.3, "2512"),
        (9_999.6, "10k"),
        (9_999_990, "10M"),
        (3e6, "3M"),
        (-1.23456, "\N{MINUS SIGN}1.235"),
    ],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_drawings_stay_in_their_frames(tmp_path):
    curve = Curve(np.arange(1, 1001) * 50.0, np.random.default_rng(0).normal(size=(3, 1000)))
    flat = Curve(np.array([7.0]), np.zeros((3, 1)))
    chart = draw_curve_chart(strokes({"a": (curve, [100.0]), "b": (flat, [])}), 800, 300)
    assert chart is not None
    for line in chart.lines:
        points = [tuple(map(float, pair.split())) for pair in re.split("[ML]", line.path)[1:]]
        assert len(points) <= 200
        assert all(chart.left <= x <= chart.right and chart.top <= y <= chart.bottom for x, y in points)
    assert draw_curve_chart({}, 800, 300) is None
    space = ToySweep(tmp_path).config.space
    trials = [("a", {"algorithm": "grpo", "train.group_size": 8, "hyper.lr": 0.01}, 1.0), ("b", {}, None)]
    drawing = draw_parallel_axes(space, trials, "return", "max", "a")
    assert drawing is not None
    assert [thread.style for thread in drawing.threads] == ["none", "best"]
    assert [tick.label for tick in drawing.axes[1].ticks] == ["4", "8", "not set"]
    assert [tick.label for tick in drawing.axes[2].ticks] == ["0.0001", "0.001", "0.01", "not set"]
    assert drawing.axes[-1].ticks[-1].label == "no result"
