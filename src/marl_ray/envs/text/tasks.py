"""Tasks of text environments: problems with an answer, and programs with tests, from files.

One record a line (JSONL), an array (JSON) or a row (Parquet). Mathematics:

    {"prompt": "What is 7 times 8?", "answer": "56", "solution": "7 times 8 is 56", "task_id": "a", "level": 1}

Code, the format of `marl-ray evaluate jsonl`, so that one file serves both: functions tested by assertions, or programs
tested by what they print. `public_` tests may be shown to policies, the others score.

    {"prompt": "...", "entry_point": "add", "tests": ["assert add(1, 2) == 3"], "public_tests": [], "setup": "import math",
     "reference": "def add(a, b): return a + b", "task_id": "add", "level": 1}
    {"prompt": "...", "cases": [{"stdin": "2", "stdout": "4"}], "public_cases": [], "reference": "..."}
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from marl_ray.envs.text.base import Task
from marl_ray.errors import MarlRayError
from marl_ray.rewards.code import CallTest, CodeTask, StdioTest
from marl_ray.stored_files.record_files import FileRow, read_bytes, read_record, read_records


class StrictRecord(BaseModel):
    """A record of one of the product's own formats, which have no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MathRecord(StrictRecord):
    """A line of a file of mathematics."""

    prompt: str = Field(min_length=1)
    answer: str | int | float
    solution: str = ""
    """The text that a demonstration writes instead of the bare answer."""
    task_id: str = ""
    level: float = 0.0


class InputOutput(StrictRecord):
    """The input and the expected output of a program."""

    stdin: str
    stdout: str


class CodeRecord(StrictRecord):
    """A line of a file of code."""

    task_id: str = ""
    prompt: str
    entry_point: str = ""
    setup: str = ""
    tests: list[str] = []
    public_tests: list[str] = []
    cases: list[InputOutput] = []
    public_cases: list[InputOutput] = []
    reference: str = ""
    level: float = 0.0


@dataclass(frozen=True)
class MathTask:
    """A problem with an answer."""

    task_id: str
    prompt: str
    answer: str
    solution: str = ""
    level: float = 0.0


class ProgramTask(Task, Protocol):
    """A program to write."""

    @property
    def code(self) -> CodeTask:
        """The public and the hidden tests, and the name of the function that they call."""


@dataclass(frozen=True)
class StaticProgramTask:
    """A programming task from a file."""

    task_id: str
    prompt: str
    code: CodeTask
    level: float = 0.0


Made = TypeVar("Made")
R = TypeVar("R", MathRecord, CodeRecord)


@lru_cache(maxsize=8)
def read_math(path: str) -> tuple[MathTask, ...]:
    """Read the math tasks of a file (a path or a URI, `s3://...`), once per process.

    Raises MarlRayError naming file, line and field, or if there is no task, or a task id comes twice.
    """

    def make(task_id: str, record: MathRecord, where: str) -> MathTask:
        return MathTask(task_id, record.prompt, str(record.answer), record.solution, record.level)

    return _tasks_by_id(path, read_records(path, read_bytes(path)), MathRecord, make)


@lru_cache(maxsize=8)
def read_code(path: str) -> tuple[ProgramTask, ...]:
    """Read the programming tasks of a file, once per process. Raises MarlRayError as `read_math` does."""

    def make(task_id: str, record: CodeRecord, where: str) -> ProgramTask:
        return StaticProgramTask(task_id, record.prompt, code_task(record, where), record.level)

    return _tasks_by_id(path, read_records(path, read_bytes(path)), CodeRecord, make)


def code_task(record: CodeRecord, where: str) -> CodeTask:
    """Return the tests of a record. Raises MarlRayError where it is neither of its two kinds."""
    if bool(record.tests) == bool(record.cases):
        raise MarlRayError(f"{where}: expected either tests or cases")
    if bool(record.entry_point) != bool(record.tests):
        raise MarlRayError(f"{where}: entry_point: expected with tests, and only there")
    if record.public_tests if record.cases else record.public_cases:
        raise MarlRayError(f"{where}: public_{'tests' if record.cases else 'cases'}: expected tests of one kind")
    if record.tests:
        return CodeTask(
            tuple(CallTest(test) for test in record.tests),
            tuple(CallTest(test) for test in record.public_tests),
            record.entry_point,
            record.setup,
            record.reference,
        )
    return CodeTask(_stdio_tests(record.cases), _stdio_tests(record.public_cases), reference=record.reference)


def _stdio_tests(cases: Iterable[InputOutput]) -> tuple[StdioTest, ...]:
    return tuple(StdioTest(case.stdin.encode(), case.stdout.encode()) for case in cases)


def _tasks_by_id(
    path: str, rows: Iterable[FileRow], model: type[R], make: Callable[[str, R, str], Made]
) -> tuple[Made, ...]:
    """Return a task of every row; one without an id is called by its number."""
    tasks: dict[str, Made] = {}
    seen: dict[str, str] = {}
    for row in rows:
        record = read_record(model, _without_nulls(row))
        task_id = record.task_id or str(len(tasks))
        if task_id in seen:
            raise MarlRayError(f"{row.where}: task_id {task_id!r} is already that of {seen[task_id]}")
        seen[task_id] = row.where
        tasks[task_id] = make(task_id, record, row.where)
    if not tasks:
        raise MarlRayError(f"{path}: expected at least one task")
    return tuple(tasks.values())


def _without_nulls(row: FileRow) -> FileRow:
    """Return the row without nulls: a column of a Parquet file has one where a record does not have the field."""
    if not isinstance(row.values, dict):
        return row
    return FileRow(row.where, {key: value for key, value in row.values.items() if value is not None})
