"""Problems with an answer, in the format of the environment `math` (see `marl_ray.envs.text.tasks`).

    {"prompt": "What is 7 times 8?", "answer": "56", "task_id": "a"}

An answer is right where `marl_ray.rewards.math_reward` pays for it; nothing that a model writes is run. A problem without
`task_id` is called by its number, from 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from marl_ray.envs.text.tasks import MathRecord
from marl_ray.evaluation.benchmarks.base import (
    Benchmark,
    Mode,
    ModelAnswer,
    Problem,
    SampleVerdict,
    Verdicts,
    unique_problems,
)
from marl_ray.rewards.math_reward import math_reward
from marl_ray.sandbox import Pool
from marl_ray.stored_files.record_files import FileRow, read_record


@dataclass(frozen=True)
class MathProblem(Problem):
    """A problem with one right answer."""

    answer: str

    @property
    @override
    def modes(self) -> tuple[Mode, ...]:
        return ("hardened",)

    def scored_part(self, text: str) -> str | None:
        """Return the text as it is, never None: the final answer is read from all of it."""
        return text

    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Compare the final answer of the text with the right one."""
        right = bool(math_reward(source.text, self.answer))
        return {"hardened": SampleVerdict(right, "passed" if right else "wrong answer")}


def parse(rows: Iterable[FileRow]) -> tuple[Problem, ...]:
    """Return the problems of a file of mathematics."""
    return unique_problems(
        (row, _make_problem(number, read_record(MathRecord, row))) for number, row in enumerate(rows)
    )


def _make_problem(number: int, record: MathRecord) -> Problem:
    answer = str(record.answer)
    return MathProblem(record.task_id or str(number), record.prompt, "", (record.solution or answer,), answer)


MATH = Benchmark(
    name="math",
    title="Problems with an answer",
    parse=parse,
    modes=("hardened",),
    timeout_s=3.0,
    ks=(1, 10, 100),
    known_digests={},
    writes="output",
)
