"""Scoring of a function by assertions, for HumanEval, MBPP and the product's own format."""

import time
from collections.abc import Sequence

from marl_ray.evaluation.benchmarks.base import Mode, SampleVerdict, Verdicts
from marl_ray.sandbox import Limits, Pool


def score_function(
    pool: Pool,
    *,
    official: str,
    candidate: str,
    tests: str,
    entry_point: str,
    setup: str,
    modes: Sequence[Mode],
    timeout_s: float,
) -> Verdicts:
    """Score a function in the given modes.

    `official` is the complete program of the official mode; hardened mode runs tests and candidate apart. `setup` is
    trusted code that the tests of the hardened judge may need, such as imports and helpers.
    """
    limits = Limits(cpu_s=timeout_s)
    verdicts: dict[Mode, SampleVerdict] = {}
    if "official" in modes:
        begin = time.perf_counter()
        result = pool.official(official, limits)
        wall_s = time.perf_counter() - begin
        verdicts["official"] = SampleVerdict(result == "passed", result, wall_s, level=pool.level.name.lower())
    if "hardened" in modes:
        done = pool.judge(candidate, tests, entry_point=entry_point, setup=setup, limits=limits)
        result = done.verdict if not done.message else f"{done.verdict}: {done.message}"
        verdicts["hardened"] = SampleVerdict(done.passed, result, done.wall_s, done.cpu_s, done.level.name.lower())
    return verdicts
