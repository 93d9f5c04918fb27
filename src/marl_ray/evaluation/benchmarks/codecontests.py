"""CodeContests (Li et al. 2022, arXiv 2203.07814): programs that read stdin and print.

A program meets all public, private and generated tests. The tokens of its output are compared as officially, and stdin
is a regular file. One run of a test serves both modes: official looks at the output alone, as the C++ does; hardened
also wants the program to have ended well.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import (
    Benchmark,
    BenchmarkRecord,
    Mode,
    ModelAnswer,
    Problem,
    Unused,
    Verdicts,
    unique_problems,
)
from marl_ray.evaluation.benchmarks.code_tests import MIN_MEMORY_BYTES, WALL_FACTOR, run_stdio
from marl_ray.rewards.code import StdioTest
from marl_ray.sandbox import Pool
from marl_ray.sandbox.limits import MAX_MEMORY_BYTES
from marl_ray.stored_files.record_files import FileRow, read_record

PYTHON3_NUMBER = 3
"""Number of Python 3 among the languages of the data; 1 is Python 2."""
MAX_REFERENCES = 3
"""Number of a problem's Python 3 solutions that are tried before the problem is left out."""
EXTRA_MEMORY_BYTES = 32 << 20
"""Address space beyond a problem's limit, for the interpreter: as `CreateSandboxWithFds` of tester_sandboxer.cc has it."""


class Tests(BaseModel):
    """Inputs and outputs, in two lists."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: list[str]
    output: list[str]


class Solutions(BaseModel):
    """Programs and their languages, in two lists."""

    model_config = ConfigDict(extra="forbid", strict=True)

    language: list[int]
    solution: list[str]


class ContestRecord(BenchmarkRecord):
    """A row of the data set on the hub."""

    name: str
    description: str
    public_tests: Tests
    private_tests: Tests
    generated_tests: Tests
    solutions: Solutions = Solutions(language=[], solution=[])
    memory_limit_bytes: int = Field(0, le=MAX_MEMORY_BYTES)
    source: Unused = None
    difficulty: Unused = None
    incorrect_solutions: Unused = None
    cf_contest_id: Unused = None
    cf_index: Unused = None
    cf_points: Unused = None
    cf_rating: Unused = None
    cf_tags: Unused = None
    is_description_translated: Unused = None
    untranslated_description: Unused = None
    time_limit: Unused = None
    """Time limit on the contest's own machines, not used: the evaluation has its own limit."""
    input_file: Unused = None
    output_file: Unused = None


class FusionRecord(BenchmarkRecord):
    """A line of SandboxFusion's sample: some fields are JSON in strings, and none has solutions."""

    content: str
    labels: str
    test: str
    id: Unused = None
    internal_uuid: Unused = Field(None, alias="__internal_uuid__")


@dataclass(frozen=True)
class ContestProblem(Problem):
    """A program to write, and its tests."""

    tests: tuple[StdioTest, ...]
    memory_bytes: int

    @property
    @override
    def max_time_limits(self) -> float:
        return WALL_FACTOR * len(self.tests)

    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Run tests until one has failed in every mode asked for."""
        verdicts = run_stdio(pool, source.text, self.tests, timeout_s, self.memory_bytes)
        return {mode: verdicts[mode] for mode in modes}


def parse(rows: Iterable[FileRow]) -> tuple[Problem, ...]:
    """Return the problems of the hub's format, or of SandboxFusion's."""
    return unique_problems((row, _read_problem(row)) for row in rows)


def _read_problem(row: FileRow) -> Problem:
    if isinstance(row.values, dict) and "content" in row.values:
        return _read_fusion_problem(row)
    record = read_record(ContestRecord, row)
    try:
        tests = [
            StdioTest(stdin.encode(), stdout.encode())
            for part in (record.public_tests, record.private_tests, record.generated_tests)
            for stdin, stdout in zip(part.input, part.output, strict=True)
        ]
        solutions = zip(record.solutions.language, record.solutions.solution, strict=True)
        references = [text for language, text in solutions if language == PYTHON3_NUMBER][:MAX_REFERENCES]
    except ValueError as error:
        raise MarlRayError(f"{row.where}: tests or solutions: expected two lists of the same length") from error
    return ContestProblem(
        record.name,
        record.description,
        "",
        tuple(references),
        _require_tests(tests, row),
        max(MIN_MEMORY_BYTES, record.memory_limit_bytes + EXTRA_MEMORY_BYTES),
    )


def _read_fusion_problem(row: FileRow) -> Problem:
    record = read_record(FusionRecord, row)
    try:
        name = str(json.loads(record.labels)["name"])
        tests = [_fusion_test(test) for test in json.loads(record.test)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MarlRayError(f"{row.where}: labels or test: expected SandboxFusion's JSON in a string") from error
    return ContestProblem(name, record.content, "", (), _require_tests(tests, row), MIN_MEMORY_BYTES)


def _fusion_test(test: Any) -> StdioTest:
    return StdioTest(test["input"]["stdin"].encode(), test["output"]["stdout"].encode())


def _require_tests(tests: Sequence[StdioTest], row: FileRow) -> tuple[StdioTest, ...]:
    if not tests:
        raise MarlRayError(f"{row.where}: expected at least one test")
    return tuple(tests)


CODECONTESTS = Benchmark(
    name="codecontests",
    title="CodeContests",
    parse=parse,
    modes=("official", "hardened"),
    timeout_s=10.0,
    ks=(1, 10, 100),
    known_digests={
        "e286e28fe9d118f34580a36627ddd4f9105d651ef81c22f4cca406c96f94ac8f": "SandboxFusion's sample, 20 problems",
    },
    filters_references=True,
    hub=("deepmind/code_contests", None, ("test",)),
    notes="all tests, official token compare",
)
