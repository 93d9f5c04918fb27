"""Scoring of code by tests: of a function by assertions, of a program by what it prints."""

import time
from collections.abc import Sequence
from dataclasses import replace

from marl_ray.evaluation.benchmarks.base import Mode, SampleVerdict, Verdicts
from marl_ray.rewards.code import StdioTest
from marl_ray.rewards.outputs import outputs_match
from marl_ray.sandbox import Limits, Pool, Status

MIN_MEMORY_BYTES = 1 << 30
"""Minimum address space of a program, our own choice: Python with numpy needs more than some problems allow."""
WALL_FACTOR = 3.0
"""Ratio of the wall-clock limit to the CPU limit. CodeContests' own 30 turns ten CPU seconds into five minutes of sleep."""
MIN_OUTPUT_BYTES = 1 << 20
"""Bytes that a program may write to stdout where twice the expected output is less, our own choice."""


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


def run_stdio(
    pool: Pool, program: str, tests: Sequence[StdioTest], timeout_s: float, memory_bytes: int = MIN_MEMORY_BYTES
) -> dict[Mode, SampleVerdict]:
    """Return a program's verdicts in both modes. `timeout_s` is the CPU time of one test."""
    limits = Limits(cpu_s=timeout_s, wall_s=WALL_FACTOR * timeout_s, memory_bytes=memory_bytes)
    failed: dict[Mode, str] = {}
    wall_s = cpu_s = 0.0
    level = ""
    for number, test in enumerate(tests, 1):
        output_bytes = max(MIN_OUTPUT_BYTES, 2 * len(test.stdout))
        done = pool.run(program, stdin=test.stdin, limits=replace(limits, output_bytes=output_bytes))
        wall_s, cpu_s, level = wall_s + done.wall_s, cpu_s + done.cpu_s, done.level.name.lower()
        ended, matches = done.status is Status.OK, outputs_match(done.stdout, test.stdout)
        outcome = "wrong output" if ended else str(done.status)
        if not matches:
            failed.setdefault("official", f"test {number} of {len(tests)}: {outcome}")
        if not matches or not ended:
            failed.setdefault("hardened", f"test {number} of {len(tests)}: {outcome}")
        if "official" in failed:
            break
    modes: tuple[Mode, Mode] = ("official", "hardened")
    return {mode: SampleVerdict(mode not in failed, failed.get(mode, "passed"), wall_s, cpu_s, level) for mode in modes}
