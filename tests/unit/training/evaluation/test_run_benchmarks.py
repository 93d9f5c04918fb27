"""The benchmarks of a run: axes, last lines, picture, and the list of benchmarks."""

import pytest
from toys.texts import config

from marl_ray.config.run.sections import RUN_BENCHMARKS
from marl_ray.evaluation.benchmarks import Benchmark, benchmark
from marl_ray.extensions import BENCHMARK
from marl_ray.training.evaluation.benchmarks import curve_axes
from marl_ray.training.tracking.curve_plot import plot_benchmarks
from marl_ray.training.tracking.summary import benchmark_lines

MEASURED = "evaluation.benchmarks=[humaneval, {name: math, data: m.jsonl}]"
LOGGED = {
    "benchmark/tokens": [(0, 0.0), (20, 100.0), (40, 220.0)],
    "benchmark/hours": [(0, 0.0), (20, 0.5), (40, 1.5)],
    "benchmark/price": [(40, 3.0)],
    "benchmark/math/pass_at_1": [(0, 0.1), (40, 0.5)],
    "benchmark/math/pass_at_1_low": [(0, 0.0), (40, 0.25)],
    "benchmark/math/pass_at_1_high": [(0, 0.2), (40, 0.75)],
    "benchmark/math/failed": [(20, 1.0)],
    "benchmark/humaneval/failed": [(20, 1.0), (40, 1.0)],
}


def history(key: str) -> list[tuple[int, float]]:
    return LOGGED.get(key, [])


def test_runs_are_measured_by_every_benchmark_that_no_program_forges_and_no_reference_fails():
    usable = {
        name
        for name in BENCHMARK.builtins
        if isinstance(BENCHMARK.load(name), Benchmark)  # others are played in a browser
        and "hardened" in benchmark(name).modes
        and not benchmark(name).filters_references
    }
    assert usable == set(RUN_BENCHMARKS)


def test_a_price_is_of_all_workers_and_only_there_where_it_is_given():
    axes = curve_axes(config(MEASURED, "resources.workers=2", "resources.hourly_price=3"), 7.0, 1800.0)
    assert axes == {"benchmark/tokens": 7.0, "benchmark/hours": 0.5, "benchmark/price": pytest.approx(3.0)}
    assert "benchmark/price" not in curve_axes(config(MEASURED), 7.0, 1800.0)


def test_the_last_lines_name_first_and_last_numbers_and_every_failure():
    assert benchmark_lines(config(MEASURED), history) == [
        "humaneval    not measured at step 20, 40",
        "math    pass@1 0.500 (0.250 to 0.750) at step 40, 0.100 at first; not measured at step 20",
    ]
    assert benchmark_lines(config(), history) == []


def test_the_picture_draws_what_was_measured(tmp_path):
    path = plot_benchmarks(config(MEASURED), history, tmp_path / "b.png")
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    assert plot_benchmarks(config(), history, tmp_path / "none.png") is None
    assert plot_benchmarks(config(MEASURED), lambda key: [], tmp_path / "none.png") is None
