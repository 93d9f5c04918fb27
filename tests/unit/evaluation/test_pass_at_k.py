"""The estimator pass@k against enumeration and the official example, and aggregates of benchmarks."""

import json
import math
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.pass_at_k import pass_at_k
from marl_ray.evaluation.scoring.evaluate import choose_ks
from marl_ray.evaluation.scoring.report import REPORT_FILE, aggregate
from marl_ray.evaluation.statistics import problem_bootstrap

PROBLEM = {"passed": {"hardened": 1}, "hardened": {"pass@1": 0.5}}
SCORES = {"hardened": {"pass@1": {"value": 0.5}}}


def test_the_official_example_has_the_official_last_bit():
    assert pass_at_k(6, 3, 1) == 0.4999999999999999
    assert 1 - comb(3, 1) / comb(6, 1) == 0.5  # what the textbook formula gives


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_it_is_the_chance_that_one_of_k_drawn_samples_passes(case):
    n, c, k = case
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert math.isclose(pass_at_k(n, c, k), float(exact), abs_tol=1e-14)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))))
def test_it_does_not_fall_as_k_grows(case):
    n, c = case
    values = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    assert values == sorted(values) and values[-1] == (c > 0)


def test_default_ks_are_those_that_every_problem_has_samples_for():
    assert choose_ks({"a": 10, "b": 12}, None, (1, 10, 100)) == (1, 10)


@pytest.mark.parametrize(
    ("ks", "message"),
    [((1, 5), r"^k: problem 'b' has only 2 samples, not 5$"), ((0,), "^k: expected at least 1, got 0$")],
)
def test_a_wanted_k_must_be_possible(ks, message):
    with pytest.raises(MarlRayError, match=message):
        choose_ks({"a": 9, "b": 2}, ks, (1,))


def test_a_bootstrap_interval_covers_the_mean_and_narrows_with_problems():
    few, many = (np.random.default_rng(0).random(n) for n in (20, 2000))
    small, large = problem_bootstrap([few], [1.0]), problem_bootstrap([many], [1.0])
    assert small.low < few.mean() < small.high and small.value == few.mean()
    assert large.high - large.low < (small.high - small.low) / 5
    assert problem_bootstrap([few], [1.0]) == small


def test_aggregates_are_means_by_weight_however_many_problems_a_benchmark_has():
    interval = problem_bootstrap([np.ones(3), np.zeros(300)], [3.0, 1.0])
    assert interval == (0.75, 0.75, 0.75)


@pytest.mark.parametrize(
    ("groups", "weights"), [([], []), ([np.ones(2)], [0.0]), ([np.ones(0)], [1.0]), ([np.ones(1)], [-1.0])]
)
def test_nothing_to_aggregate_is_an_error(groups, weights):
    with pytest.raises(
        MarlRayError,
        match=r"^aggregate: expected evaluations with problems, and finite weights that add up to more than 0$",
    ):
        problem_bootstrap(groups, weights)


@pytest.mark.parametrize(
    "report",
    [
        [],
        {"problems": [], "scores": SCORES, "evaluation": {"variant": "v"}},
        {
            "problems": {"a": {"passed": {"hardened": 1}, "hardened": {"pass@1": "half"}}},
            "scores": SCORES,
            "evaluation": {"variant": "v"},
        },
        {"problems": {"a": PROBLEM}, "scores": SCORES},
        {"problems": {"a": PROBLEM}, "scores": {"hardened": {}}, "evaluation": {"variant": "v"}},
        {
            "problems": {"a": PROBLEM},
            "scores": {"hardened": {"pass@1": {"value": None}}},
            "evaluation": {"variant": "v"},
        },
    ],
)
def test_a_report_without_the_number_is_named(report, tmp_path):
    (tmp_path / REPORT_FILE).write_text(json.dumps(report))
    with pytest.raises(MarlRayError) as refused:
        aggregate({tmp_path: 1.0}, "pass@1", "hardened")
    assert str(refused.value) == f"{tmp_path / REPORT_FILE}: has no pass@1 of mode hardened"


def test_a_report_that_is_no_json_is_named(tmp_path):
    (tmp_path / REPORT_FILE).write_text("{")
    with pytest.raises(MarlRayError) as refused:
        aggregate({tmp_path: 1.0}, "pass@1", "hardened")
    assert str(refused.value) == f"{tmp_path / REPORT_FILE}: not JSON"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight, tmp_path):
    report = {"problems": {"a": PROBLEM}, "scores": SCORES, "evaluation": {"variant": "v"}}
    (tmp_path / REPORT_FILE).write_text(json.dumps(report))
    with pytest.raises(MarlRayError) as refused:
        aggregate({tmp_path: weight}, "pass@1", "hardened")
    assert str(refused.value) == (
        "aggregate: expected evaluations with problems, and finite weights that add up to more than 0"
    )
