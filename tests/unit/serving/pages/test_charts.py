"""Charts of the page: labels that stay apart, time ticks, scales, and numbers with the decimals that say something."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.serving.pages.charts import (
    display_step,
    draw_time_chart,
    evidence_share,
    round_to_step,
    scale_arm_intervals,
)

NOON = 1_795_262_400.0  # 2026-11-21T12:00:00Z
ROWS = st.lists(
    st.tuples(
        st.floats(0, 4e9),
        st.integers(1, 1000),
        st.floats(-1e100, 1e100),
        *[st.one_of(st.none(), st.floats(-1e100, 1e100))] * 2,
    ),
    max_size=30,
)


@given(st.dictionaries(st.text(max_size=3), ROWS, max_size=3))
def test_charts_keep_their_labels_apart_and_inside(curves):
    chart = draw_time_chart(curves, 820, 330)
    if chart is None:
        assert not any(curves.values())
        return
    assert [line.arm for line in chart.lines] == [arm for arm, rows in curves.items() if rows]
    for ticks, low, high in ((chart.times, chart.left, chart.right), (chart.values, chart.top, chart.bottom)):
        places = sorted(tick.at for tick in ticks)
        assert all(low - 0.1 <= place <= high + 0.1 for place in places)
        assert all(b - a >= 15 for a, b in pairwise(places))
    for line in chart.lines:
        assert "nan" not in line.path + line.band
        assert "inf" not in line.path + line.band


def test_time_ticks_are_round_and_midnight_shows_the_day():
    day = [[NOON + 3600 * k, k, 1.0, None, None] for k in range(25)]
    chart = draw_time_chart({"a": day}, 820, 330)
    assert chart is not None
    assert [tick.label for tick in chart.times] == [
        "12:00",
        "15:00",
        "18:00",
        "21:00",
        "22 Nov",
        "03:00",
        "06:00",
        "09:00",
        "12:00",
    ]
    assert chart.first_day == "2026-11-21"
    assert chart.lines[0].band == ""


def test_early_wide_bands_do_not_set_the_scale():
    rows = [[NOON + k, k, 0.5, 0.5 - 100 / k, 0.5 + 100 / k] for k in range(1, 1001)]
    chart = draw_time_chart({"a": rows}, 820, 330)
    assert chart is not None
    assert {tick.label for tick in chart.values} <= {
        "\N{MINUS SIGN}0.4",
        "\N{MINUS SIGN}0.2",
        "0.0",
        "0.2",
        "0.4",
        "0.6",
        "0.8",
        "1.0",
        "1.2",
    }


def test_numbers_of_a_column_share_their_decimals():
    assert [round_to_step(value, display_step([12.5, 0.03])) for value in (12.5, -0.03)] == [
        "12.50",
        "\N{MINUS SIGN}0.03",
    ]
    assert round_to_step(1234567.0, display_step([1234567.0])) == "1,234,567"
    assert round_to_step(0.25, 0.01, sign=True) == "+0.25"
    assert round_to_step(1e100, display_step([1e100])) == "1e+100"
    assert round_to_step(0.0, display_step([])) == "0.000"


def test_evidence_fills_its_bar_at_one_over_alpha():
    assert [evidence_share(e, 0.05) for e in (0.0, 0.5, 1.0, 20.0, 1e300)] == pytest.approx([0, 0, 0, 1, 1])
    assert evidence_share(math.sqrt(20), 0.05) == pytest.approx(0.5)


def test_intervals_of_all_treatments_lie_on_one_scale_with_zero_and_the_margin():
    drawn = scale_arm_intervals({"a": (-0.1, 0.0, 0.1), "b": (0.0, 0.2, 0.4)}, 0.05)
    assert drawn["a"].zero == drawn["b"].zero == drawn["b"].low == drawn["a"].middle
    assert drawn["a"].low < drawn["a"].margin < drawn["a"].zero < drawn["b"].middle < drawn["b"].high
    assert scale_arm_intervals({"a": (0.0, 0.0, 0.0)}, 0.0)["a"].low == 4.0
