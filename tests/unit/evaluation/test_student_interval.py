"""Student's interval against printed tables."""

import pytest

from marl_ray.evaluation.student_interval import student_interval


@pytest.mark.parametrize(
    ("values", "quantile"),
    [([1.0, 2.0, 3.0], 4.303), ([float(k) for k in range(10)], 2.262)],
)
def test_the_half_width_is_that_of_the_tables(values, quantile):
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half_width = quantile * (variance / len(values)) ** 0.5
    assert student_interval(values) == pytest.approx((mean - half_width, mean + half_width), abs=1e-3)
