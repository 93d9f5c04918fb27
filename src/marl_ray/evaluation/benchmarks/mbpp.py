"""MBPP (Austin et al. 2021, arXiv 2108.07732): functions from a sentence and three assertions.

There is no official executor. The product runs the code, the set-up of its tests and all of its tests in one
interpreter, as HumanEval's harness does, within 10 s; the prompt is the paper's, with the problems 2, 3 and 4 as
its shots.
"""

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import override

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import (
    NO_TESTS,
    Benchmark,
    BenchmarkRecord,
    Mode,
    ModelAnswer,
    Problem,
    Unused,
    Verdicts,
    parse_python,
    unique_problems,
)
from marl_ray.evaluation.benchmarks.code_tests import score_function
from marl_ray.rewards.code import CallTest, CodeTask
from marl_ray.sandbox import Pool
from marl_ray.stored_files.record_files import FileRow, read_record

SHOT_NUMBERS = (2, 3, 4)
"""Problems that the prompt shows with their solutions, as in the paper (README of google-research/mbpp)."""
UNSPLIT_TASKS = frozenset({367, 601, 927})
"""Problems whose tests pass objects of the candidate's own classes to the function: no split judge can serve them."""
BEGIN_MARK, DONE_MARK = "[BEGIN]", "[DONE]"
"""Marks in the paper's prompt before and after a solution."""


class MbppRecord(BenchmarkRecord):
    """A line of mbpp.jsonl."""

    task_id: int
    text: str
    code: str
    test_setup_code: str
    test_list: list[str]
    challenge_test_list: Unused = None
    """Harder tests of eleven problems; no published number counts them."""

    @property
    def setup(self) -> str:
        """Code that the tests need."""
        return self.test_setup_code


class SanitizedRecord(BenchmarkRecord):
    """An element of sanitized-mbpp.json."""

    task_id: int
    prompt: str
    code: str
    test_imports: list[str]
    test_list: list[str]
    source_file: Unused = None

    @property
    def text(self) -> str:
        """The task in words."""
        return self.prompt

    @property
    def setup(self) -> str:
        """Code that the tests need; without it 13 references fail."""
        return "\n".join(self.test_imports)


@dataclass(frozen=True)
class MbppProblem(Problem):
    """A function and its assertions."""

    number: int
    setup: str
    tests: tuple[str, ...]

    @property
    @override
    def modes(self) -> tuple[Mode, ...]:
        return ("official",) if self.number in UNSPLIT_TASKS else ("official", "hardened")

    @property
    @override
    def visible_task(self) -> CodeTask:
        if self.number in UNSPLIT_TASKS:
            return super().visible_task
        setup = f"{self.references[0]}\n{self.setup}"
        return CodeTask(NO_TESTS, tuple(map(CallTest, self.tests)), self.entry_point, setup)

    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Score a sample; a completion ends at the prompt's stop word."""
        program = source.text.split(DONE_MARK)[0] if source.kind == "completion" else source.text
        tests = "\n".join(self.tests)
        return score_function(
            pool,
            official="\n".join([program, *([self.setup] if self.setup else []), tests]),
            candidate=program,
            tests=tests,
            entry_point=self.entry_point,
            setup=f"{self.references[0]}\n{self.setup}",
            modes=modes,
            timeout_s=timeout_s,
        )


def parse(model: type[MbppRecord] | type[SanitizedRecord], rows: Iterable[FileRow]) -> tuple[Problem, ...]:
    """Return the problems of an MBPP file. Raises MarlRayError if one of the prompt's shots is missing."""
    records = [(row, read_record(model, row)) for row in rows]
    by_number = {record.task_id: record for _, record in records}
    missing = [number for number in SHOT_NUMBERS if number not in by_number]
    if records and missing:
        where = records[0][0].where
        raise MarlRayError(f"{where}: problem {missing[0]} is missing; the prompt's examples are 2, 3 and 4")
    shots = "".join(
        f"{_question(by_number[n])}\n{_with_line_feeds(by_number[n].code)}\n{DONE_MARK}\n"
        for n in SHOT_NUMBERS
        if by_number
    )
    return unique_problems(
        (row, _make_problem(record, f"{shots}{_question(record)}\n", row.where)) for row, record in records
    )


def _make_problem(record: MbppRecord | SanitizedRecord, prompt: str, where: str) -> Problem:
    return MbppProblem(
        f"Mbpp/{record.task_id}",
        prompt,
        _entry_point(record.code, record.test_list, where),
        (record.code,),
        record.task_id,
        record.setup,
        tuple(record.test_list),
    )


def _question(record: MbppRecord | SanitizedRecord) -> str:
    tests = "\n".join(record.test_list)
    return (
        f"You are an expert Python programmer, and here is your task: {record.text} "
        f"Your code should pass these tests:\n\n{tests}\n{BEGIN_MARK}"
    )


def _with_line_feeds(code: str) -> str:
    return code.replace("\r\n", "\n")


def _entry_point(code: str, tests: Sequence[str], where: str) -> str:
    """Return the name of the function of the reference that the tests call."""
    try:
        functions = {node.name for node in parse_python(code).body if isinstance(node, ast.FunctionDef)}
        names = [node.id for test in tests for node in ast.walk(parse_python(test)) if isinstance(node, ast.Name)]
    except SyntaxError as error:
        raise MarlRayError(f"{where}: code or test_list: not Python: {error.msg}") from error
    called = [name for name in names if name in functions]
    if not called:
        raise MarlRayError(f"{where}: test_list: no test calls a function that `code` defines")
    return called[0]


def _canonical_id(task_id: str) -> str:
    prefix, _, number = task_id.rpartition("/")
    return f"Mbpp/{number}" if prefix.lower() in ("", "mbpp") else task_id


def _has_number(low: int, high: int, problem: Problem) -> bool:
    """Return True if the number of an MBPP problem lies between `low` and `high`, both included."""
    assert isinstance(problem, MbppProblem)
    return low <= problem.number <= high


SPLITS: dict[str, Callable[[Problem], bool]] = {
    "all": lambda _: True,
    "test": partial(_has_number, 11, 510),
    "validation": partial(_has_number, 511, 600),
    "train": partial(_has_number, 601, 974),
    "prompt": partial(_has_number, 1, 10),
}
"""The splits of the paper, by the numbers of their problems."""
NOTES = "all tests, in HumanEval's harness"

MBPP = Benchmark(
    name="mbpp",
    title="MBPP",
    parse=partial(parse, MbppRecord),
    modes=("official", "hardened"),
    timeout_s=10.0,
    ks=(1, 10, 100),
    known_digests={"ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f": "974 problems"},
    splits=SPLITS,
    canonical_id=_canonical_id,
    hub=("google-research-datasets/mbpp", "full", ("prompt", "test", "validation", "train")),
    writes="completion",
    stop=(DONE_MARK,),
    notes=NOTES,
)
MBPP_SANITIZED = replace(
    MBPP,
    name="mbpp-sanitized",
    title="MBPP sanitized",
    parse=partial(parse, SanitizedRecord),
    known_digests={"ca95deaa9a01ef0a6f439f88bcf0dd3db3563d22f22aad6cae04ebb9a8d8c8e9": "427 problems"},
    hub=("google-research-datasets/mbpp", "sanitized", ("prompt", "test", "validation", "train")),
)
