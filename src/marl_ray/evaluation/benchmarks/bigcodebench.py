"""BigCodeBench (Zhuo et al. 2024, arXiv 2406.15877): functions that use libraries.

It has 1,140 problems, each with tests of unittest. A sample is calibrated, as officially: the tests run on
`code_prompt + "\\n    pass\\n" + solution`. The tests patch modules of the program under test, so they cannot run in
another process. The verdict is therefore of lower trust: good for evaluation, never a reward.
"""

import ast
import contextlib
import json
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources

from typing_extensions import override

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import (
    Benchmark,
    BenchmarkRecord,
    Mode,
    ModelAnswer,
    Problem,
    SampleVerdict,
    Unused,
    Verdicts,
    parse_python,
    unique_problems,
)
from marl_ray.sandbox import Limits, Pool, Status
from marl_ray.stored_files.record_files import FileRow, read_record

MEMORY_BYTES = min(30 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
"""Limit of the address space: officially 30 GiB; here at most half of the machine's memory, which it might use."""
STACK_BYTES = 10 << 20
"""Limit of the stack: the 10 MiB that evaluate.py of bigcodebench 0.2.5 takes by default."""
OFFLINE_FAILURES = frozenset({176, 314, 812, 832, 1005, 1040, 1104})
"""Task numbers, among the 300 that use the standard library alone, whose references cannot pass here.

These problems need a network or another machine, or take longer than a minute anywhere. An evaluation finds those that
the sandbox itself forbids by running the references.
"""
SUSPICIOUS_NAMES = (
    "_getframe",
    "f_back",
    "tb_frame",
    "f_globals",
    "gc.get_objects",
    "currentframe",
    "inspect.stack",
    "SkipTest",
    "TestResult",
    "TestCase",
    "unittest",
    "settrace",
    "setprofile",
    "_exit",
    "sys.modules",
    "__builtins__",
    "os.dup",
    "os.read",
    "F_DUPFD",
)
_SUSPICIOUS_PATTERN = re.compile("|".join(map(re.escape, SUSPICIOUS_NAMES)))


class BigCodeBenchRecord(BenchmarkRecord):
    """A line of the data set."""

    task_id: str
    complete_prompt: str
    instruct_prompt: str
    canonical_solution: str
    code_prompt: str
    test: str
    entry_point: str
    libs: str
    doc_struct: Unused = None


@dataclass(frozen=True)
class BigCodeBenchProblem(Problem):
    """A function and a `TestCases`."""

    complete_prompt: str
    code_prompt: str
    test: str
    tests: int
    libraries: frozenset[str]
    """Top-level modules that reference and tests import."""

    @property
    @override
    def packages(self) -> frozenset[str]:
        return self.libraries - sys.stdlib_module_names

    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Score a sample; both modes run tests and program in one interpreter.

        Hardened mode adds the guards of `unittest_driver`.
        """
        solution = self.complete_prompt + source.text if source.kind == "completion" else source.text
        code = f"{self.code_prompt}\n    pass\n{solution}"
        limits = Limits(cpu_s=timeout_s, memory_bytes=MEMORY_BYTES, stack_bytes=STACK_BYTES)
        flags = tuple(sorted(set(_SUSPICIOUS_PATTERN.findall(source.text))))
        return {mode: self._run(pool, code, mode, limits, flags) for mode in modes}

    def _run(self, pool: Pool, code: str, mode: Mode, limits: Limits, flags: tuple[str, ...]) -> SampleVerdict:
        nonce = secrets.token_hex(32).encode()
        job = {"code": code, "test": self.test, "tests": self.tests, "hardened": mode == "hardened"}
        payload = json.dumps(job).encode()
        stdin = b"%d\n%b%b" % (len(payload), payload, nonce)
        done = pool.run(driver_source(), stdin=stdin, limits=limits)
        parts = done.stdout.split(b"\n" + nonce)
        passed, result = False, str(done.status) if done.status is not Status.OK else "no verdict"
        if done.status is Status.OK and len(parts) == 2:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # the program's words, perhaps
                verdict = json.loads(parts[1])
                message = str(verdict["message"]).encode("utf-8", "backslashreplace").decode()
                passed = verdict["passed"] is True
                result = "passed" if passed else f"failed: {message}"
        return SampleVerdict(passed, result, done.wall_s, done.cpu_s, done.level.name.lower(), flags)


@cache
def driver_source() -> str:
    """Return the program that runs a task in the sandbox."""
    return resources.files("marl_ray.evaluation.benchmarks.sandboxed").joinpath("unittest_driver.py").read_text()


def parse(prompt: str, rows: Iterable[FileRow]) -> tuple[Problem, ...]:
    """Return the problems of a BigCodeBench file; `prompt` is `complete` or `instruct`."""
    return unique_problems(
        (row, _make_problem(read_record(BigCodeBenchRecord, row), prompt, row.where)) for row in rows
    )


def _make_problem(record: BigCodeBenchRecord, prompt: str, where: str) -> Problem:
    reference = record.complete_prompt + record.canonical_solution
    try:
        tests = parse_python(record.test)
        libraries = _imported_modules(parse_python(reference)) | _imported_modules(tests)
    except SyntaxError as error:
        raise MarlRayError(f"{where}: test or canonical_solution: not Python: {error.msg}") from error
    return BigCodeBenchProblem(
        record.task_id,
        record.complete_prompt if prompt == "complete" else record.instruct_prompt,
        record.entry_point,
        (reference,),
        record.complete_prompt,
        record.code_prompt,
        record.test,
        _count_tests(tests, where),
        libraries,
    )


def _imported_modules(tree: ast.AST) -> frozenset[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    return frozenset(modules)


def _count_tests(tests: ast.Module, where: str) -> int:
    """Return the number of test methods of TestCases."""
    for node in tests.body:
        if isinstance(node, ast.ClassDef) and node.name == "TestCases":
            return len({f.name for f in node.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test")})
    raise MarlRayError(f"{where}: test: expected a class TestCases")


def _all(problem: Problem) -> bool:
    return True


def _standard_library(problem: Problem) -> bool:
    assert isinstance(problem, BigCodeBenchProblem)
    number = problem.task_id.rpartition("/")[2]
    return problem.libraries <= sys.stdlib_module_names and int(number) not in OFFLINE_FAILURES


def _benchmark(prompt: str) -> Benchmark:
    splits: dict[str, Callable[[Problem], bool]] = {"all": _all, "stdlib": _standard_library}
    return Benchmark(
        name=f"bigcodebench-{prompt}",
        title=f"BigCodeBench {prompt.title()}",
        parse=partial(parse, prompt),
        modes=("official", "hardened"),
        timeout_s=241.0,
        ks=(1, 5, 10),
        known_digests={
            "410f12abaeea8441c8e1d0b928e3c148897cc4e494dba50b32083dd6e7640450": "v0.1.4, 1,140 problems",
        },
        splits=splits,
        filters_references=True,
        writes="completion" if prompt == "complete" else "solution",
        hub=("bigcode/bigcodebench", None, ("v0.1.4",)),
        notes="local execution, calibrated, tests share the program's interpreter (lower trust)",
    )


COMPLETE = _benchmark("complete")
INSTRUCT = _benchmark("instruct")
