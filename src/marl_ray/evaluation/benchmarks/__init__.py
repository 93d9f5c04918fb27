"""Benchmarks of code and mathematics behind one interface; an explicit dictionary registers them."""

from marl_ray.envs.text.record_files import FileRow
from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.evaluation.benchmarks.base import (
    KINDS,
    Benchmark,
    Kind,
    Mode,
    ModelAnswer,
    Problem,
    SampleVerdict,
    Verdicts,
    program_of,
)
from marl_ray.evaluation.benchmarks.bigcodebench import COMPLETE, INSTRUCT
from marl_ray.evaluation.benchmarks.codecontests import CODECONTESTS
from marl_ray.evaluation.benchmarks.evalplus import HUMANEVAL_PLUS, MBPP_PLUS
from marl_ray.evaluation.benchmarks.humaneval import HUMANEVAL
from marl_ray.evaluation.benchmarks.jsonl import JSONL
from marl_ray.evaluation.benchmarks.math import MATH
from marl_ray.evaluation.benchmarks.mbpp import MBPP, MBPP_SANITIZED

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        HUMANEVAL,
        HUMANEVAL_PLUS,
        MBPP,
        MBPP_SANITIZED,
        MBPP_PLUS,
        COMPLETE,
        INSTRUCT,
        CODECONTESTS,
        JSONL,
        MATH,
    )
}


def benchmark(name: str) -> Benchmark:
    """A benchmark by name. Raises MarlRayError listing those there are."""
    if name not in BENCHMARKS:
        raise MarlRayError(f"benchmark {name!r} is unknown{did_you_mean(name, BENCHMARKS)}")
    return BENCHMARKS[name]


__all__ = [
    "BENCHMARKS",
    "KINDS",
    "Benchmark",
    "FileRow",
    "Kind",
    "Mode",
    "ModelAnswer",
    "Problem",
    "SampleVerdict",
    "Verdicts",
    "benchmark",
    "program_of",
]
