"""Benchmarks of code and mathematics behind one interface; `marl_ray.extensions.BENCHMARK` has those that come with it."""

import re

from marl_ray.config.base import NAME_PATTERN
from marl_ray.envs.text.record_files import FileRow, read_record
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import (
    KINDS,
    Benchmark,
    BenchmarkRecord,
    Kind,
    Mode,
    ModelAnswer,
    Problem,
    SampleVerdict,
    Verdicts,
    program_of,
    unique,
)
from marl_ray.extensions import BENCHMARK


def benchmark(name: str) -> Benchmark:
    """Return a benchmark by name or `package.module:NAME`. Raises MarlRayError if there is none."""
    try:
        chosen = BENCHMARK.load(name)
    except MarlRayError as error:
        raise MarlRayError(f"benchmark: {error}") from error
    if not isinstance(chosen, Benchmark):
        raise MarlRayError(f"benchmark: {name!r} is of type {type(chosen).__name__}, expected a Benchmark")
    if not re.fullmatch(NAME_PATTERN, chosen.name):
        raise MarlRayError(f"benchmark: the name {chosen.name!r} of {name} does not match {NAME_PATTERN}")
    return chosen


__all__ = [
    "KINDS",
    "Benchmark",
    "BenchmarkRecord",
    "FileRow",
    "Kind",
    "Mode",
    "ModelAnswer",
    "Problem",
    "SampleVerdict",
    "Verdicts",
    "benchmark",
    "program_of",
    "read_record",
    "unique",
]
