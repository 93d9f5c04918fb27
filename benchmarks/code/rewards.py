"""The cost of a reward for code: all tests of a program in one run of the sandbox, against a run for each test.

    .venv/bin/python -m benchmarks.code.rewards

Both ways give the same verdicts. Programs that are right, that fail some tests, and that end their process in one test.
Writes `benchmarks/results/rewards.{json,md}`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.records import load_before, machine, store
from marl_ray.rewards import CallTest, CodeTask, run_tests
from marl_ray.sandbox import Limits, Pool

PROGRAMS = {
    "right": "def f(x):\n    return sum(range(x + 1))\n",
    "fails some": "def f(x):\n    return sum(range(x + 1)) + x % 3\n",
    "ends in one": "import os\ndef f(x):\n    if x == 2:\n        os._exit(0)\n    return sum(range(x + 1))\n",
}
TESTS, ROUNDS = (3, 10, 50), 7
"""Numbers of tests of a program, and measurements of each, of which the median is reported."""
LIMITS = Limits(cpu_s=3.0)


def seconds(body: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    body()
    return time.perf_counter() - begin


def main() -> None:
    load = load_before()
    rows: list[dict[str, Any]] = []
    with Pool(1) as pool:
        for count in TESTS:
            tests = tuple(CallTest(f"assert f({x}) == {x * (x + 1) // 2}") for x in range(count))
            task = CodeTask(tests, entry_point="f")
            for what, code in PROGRAMS.items():

                def judge_together(code: str = code, task: CodeTask = task) -> tuple[str, ...]:
                    return run_tests(pool, code, task.hidden, task, LIMITS).verdicts

                def judge_each(code: str = code, task: CodeTask = task) -> tuple[str, ...]:
                    return tuple(run_tests(pool, code, (test,), task, LIMITS).verdicts[0] for test in task.hidden)

                assert judge_together() == judge_each()
                times = [(seconds(judge_together), seconds(judge_each)) for _ in range(ROUNDS)]
                row: dict[str, Any] = {"tests": count, "program": what}
                row |= {"one_run_s": [a for a, _ in times], "run_per_test_s": [b for _, b in times]}
                rows.append(row)
    lines = ["# Rewards for code", "", "Programs a second on one core, medians of seven rounds.", ""]
    lines += ["| tests | program | one run | a run for each test | times as many |", "|---|---|---|---|---|"]
    for row in rows:
        single, many = (1 / statistics.median(row[key]) for key in ("one_run_s", "run_per_test_s"))
        lines.append(f"| {row['tests']} | {row['program']} | {single:.0f} | {many:.1f} | {single / many:.1f} |")
    result = {"machine": machine("marl-ray"), "load_before": load, "rows": rows}
    store("rewards", result, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
