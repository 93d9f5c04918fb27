"""Benchmarks of code and mathematics, behind one interface."""

import re

from marl_ray.config.base import NAME_PATTERN
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import (
    ANSWER_KINDS,
    AnswerKind,
    Benchmark,
    BenchmarkRecord,
    Mode,
    ModelAnswer,
    Problem,
    SampleVerdict,
    Verdicts,
    program_of,
    unique_problems,
)
from marl_ray.extensions import BENCHMARK
from marl_ray.stored_files.record_files import FileRow, read_record


def benchmark(name: str) -> Benchmark:
    """Return a benchmark by name or `package.module:NAME`. Raises MarlRayError if there is none."""
    try:
        loaded = BENCHMARK.load(name)
    except MarlRayError as error:
        raise MarlRayError(f"benchmark: {error}") from error
    if not isinstance(loaded, Benchmark):
        raise MarlRayError(f"benchmark: {name!r} is of type {type(loaded).__name__}, expected a Benchmark")
    if not re.fullmatch(NAME_PATTERN, loaded.name):
        raise MarlRayError(f"benchmark: the name {loaded.name!r} of {name} does not match {NAME_PATTERN}")
    return loaded


__all__ = [
    "ANSWER_KINDS",
    "AnswerKind",
    "Benchmark",
    "BenchmarkRecord",
    "FileRow",
    "Mode",
    "ModelAnswer",
    "Problem",
    "SampleVerdict",
    "Verdicts",
    "benchmark",
    "program_of",
    "read_record",
    "unique_problems",
]
