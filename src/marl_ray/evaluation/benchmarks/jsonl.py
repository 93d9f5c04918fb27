"""The product's own format, in which a line is a function with assertions or a program with outputs.

    {"task_id": "add", "prompt": "...", "entry_point": "add", "tests": ["assert add(1, 2) == 3"],
     "public_tests": [], "setup": "import math", "reference": "def add(a, b): return a + b"}
    {"task_id": "double", "prompt": "...", "cases": [{"stdin": "2", "stdout": "4"}], "public_cases": [], "reference": "..."}

Public tests are for prompts and for shaping; they do not count here, and neither does `level`. The environment `code_team`
reads the same files (see `marl_ray.envs.text.tasks`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from marl_ray.envs.text.tasks import CodeRecord, code_task
from marl_ray.evaluation.benchmarks.base import (
    NO_TESTS,
    Benchmark,
    Mode,
    ModelAnswer,
    Problem,
    Verdicts,
    unique_problems,
)
from marl_ray.evaluation.benchmarks.code_tests import WALL_FACTOR, run_stdio, score_function
from marl_ray.rewards.code import CallTest, CodeTask, StdioTest
from marl_ray.sandbox import Pool
from marl_ray.stored_files.record_files import FileRow, read_record


class OwnRecord(CodeRecord):
    """A line of the file, with a `task_id`, because samples name their problem by it."""

    task_id: str


@dataclass(frozen=True)
class OwnProblem(Problem):
    """A problem of the product's own format."""

    task: CodeTask

    @property
    @override
    def modes(self) -> tuple[Mode, ...]:
        return ("hardened",)

    @property
    @override
    def max_time_limits(self) -> float:
        return 1.0 if self.entry_point else WALL_FACTOR * len(self.task.hidden)

    @property
    @override
    def visible_task(self) -> CodeTask:
        return CodeTask(NO_TESTS if self.entry_point else (), self.task.public, self.entry_point, self.task.setup)

    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Run all hidden tests; a completion continues the prompt."""
        program = self.prompt + source.text if source.kind == "completion" else source.text
        if not self.entry_point:
            cases = [test for test in self.task.hidden if isinstance(test, StdioTest)]
            return {"hardened": run_stdio(pool, program, cases, timeout_s)["hardened"]}
        tests = "\n".join(test.source for test in self.task.hidden if isinstance(test, CallTest))
        return score_function(
            pool,
            official="",
            candidate=program,
            tests=tests,
            entry_point=self.entry_point,
            setup=self.task.setup,
            modes=("hardened",),
            timeout_s=timeout_s,
        )


def parse(rows: Iterable[FileRow]) -> tuple[Problem, ...]:
    """Return the problems of the product's own format.

    Raises MarlRayError for a line that is neither of its two kinds.
    """
    return unique_problems((row, _make_problem(read_record(OwnRecord, row), row.where)) for row in rows)


def _make_problem(record: OwnRecord, where: str) -> Problem:
    references = (record.reference,) if record.reference else ()
    return OwnProblem(record.task_id, record.prompt, record.entry_point, references, code_task(record, where))


JSONL = Benchmark(
    name="jsonl",
    title="Own problems",
    parse=parse,
    modes=("hardened",),
    timeout_s=3.0,
    ks=(1, 10, 100),
    known_digests={},
)
