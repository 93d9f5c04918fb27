"""The interface of benchmarks: problems that score samples, and the facts that define a number."""

import ast
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from marl_ray.errors import MarlRayError
from marl_ray.rewards.code import CallTest, CodeTask
from marl_ray.rewards.extraction import extract
from marl_ray.sandbox import Pool
from marl_ray.stored_files.record_files import FileRow

Mode = Literal["official", "hardened"]
AnswerKind = Literal["completion", "solution", "output"]
ANSWER_KINDS: tuple[AnswerKind, ...] = ("completion", "solution", "output")
NO_TESTS = (CallTest("pass"),)
"""Placeholder for the hidden tests of a task that is shown to policies and must have some."""


@dataclass(frozen=True)
class ModelAnswer:
    """A model's answer to a problem."""

    kind: AnswerKind
    """`completion`: it continues the prompt; `solution`: a complete program; `output`: a text with code in it."""
    text: str


@dataclass(frozen=True)
class SampleVerdict:
    """Verdict of one mode on one sample."""

    passed: bool
    result: str
    """`passed`, or the reason why it did not pass."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    level: str = ""
    """Level of the sandbox that the sample ran at; empty if nothing was run."""
    flags: tuple[str, ...] = ()
    """Findings of a static scan; filled only if judge and program share an interpreter."""
    scores: Mapping[str, bool] = field(default_factory=dict)
    """Name of a further score of the benchmark (such as EvalPlus' `base`) -> True if it counts the sample as passed."""


Verdicts = Mapping[Mode, SampleVerdict]


@dataclass(frozen=True)
class Problem(ABC):
    """One problem, with its tests."""

    task_id: str
    prompt: str
    """The text that a policy is shown."""
    entry_point: str
    """Name of the function under test; empty if the whole program is tested."""
    references: tuple[str, ...] = field(repr=False)
    """Complete programs that the benchmark gives as correct."""

    @property
    def max_time_limits(self) -> float:
        """Maximum number of time limits that one mode takes."""
        return 1.0

    @property
    def packages(self) -> frozenset[str]:
        """Installed packages that programs may import beside the standard library."""
        return frozenset({"numpy"})

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Modes in which the problem can be judged."""
        return ("official", "hardened")

    @property
    def visible_task(self) -> CodeTask:
        """The tests that a policy may know, as public ones.

        These tests are those that the prompt shows or that the file calls public. The task's hidden tests are
        placeholders and no tests of this problem.
        """
        return CodeTask(NO_TESTS if self.entry_point else (), entry_point=self.entry_point)

    def scored_part(self, text: str) -> str | None:
        """Return the part of a model's `output` that is scored, which is its code.

        Returns None if the text has no complete block.
        """
        return extract(text, self.entry_point)

    @abstractmethod
    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Run the tests on a sample, once for each of these modes. `source` is a completion or a solution."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: the format of its files, its splits and limits, and the names of its numbers."""

    name: str
    title: str
    parse: Callable[[Iterable[FileRow]], tuple[Problem, ...]]
    """Rows of a file to problems, in the file's order. Raises MarlRayError naming the row."""
    modes: tuple[Mode, ...]
    timeout_s: float
    """The official limit of one sample (CodeContests: of one test)."""
    ks: tuple[int, ...]
    """Values of k that are reported when none is asked for."""
    known_digests: Mapping[str, str]
    """sha256 of a file -> its description. Empty if any file is accepted."""
    splits: Mapping[str, Callable[[Problem], bool]] = field(default_factory=lambda: {"all": lambda _: True})
    """Split -> predicate that selects its problems; the first split is taken when none is asked for."""
    filters_references: bool = False
    """True if problems whose own references all fail are left out, and counted."""
    canonical_id: Callable[[str], str] = lambda task_id: task_id
    """Function that maps every way to write a task id to the file's way."""
    data: str | None = None
    """Source of the problems when no `--data` is given."""
    hub: tuple[str, str | None, tuple[str, ...]] | None = None
    """Data set on the Hugging Face hub, its configuration and its splits."""
    writes: AnswerKind = "solution"
    """Answer of a policy without a chat template: the `completion` of a prompt, or a complete `solution`; `output` where
    every answer is a text and no program."""
    stop: tuple[str, ...] = ()
    """Strings after which a policy that continues the prompt is done."""
    notes: str = ""
    """Further facts that define the number; part of the variant's name."""


def program_of(problem: Problem, source: ModelAnswer) -> ModelAnswer | None:
    """Return the program to score: the answer itself, or the part of an `output` that counts.

    Returns None if an `output` has no such part.
    """
    if source.kind != "output":
        return source
    part = problem.scored_part(source.text)
    return None if part is None else ModelAnswer("solution", part)


class BenchmarkRecord(BaseModel):
    """The base of the records of official files.

    A field that is not listed is refused, because it may hold tests that would not run. A field that is listed and not
    used has the type `Unused`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Unused = Any
"""Type of a field that files of the benchmark have and that is not read."""


def parse_python(code: str) -> ast.Module:
    """Return the syntax tree of trusted code, without warnings of the invalid escapes in the data.

    Raises SyntaxError.
    """
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(code)


def unique_problems(problems: Iterable[tuple[FileRow, Problem]]) -> tuple[Problem, ...]:
    """Return the problems as a tuple. Raises MarlRayError naming the row whose task id an earlier one has."""
    places: dict[str, str] = {}
    problems_of_rows = []
    for row, problem in problems:
        if problem.task_id in places:
            raise MarlRayError(f"{row.where}: task_id {problem.task_id!r} is already that of {places[problem.task_id]}")
        places[problem.task_id] = row.where
        problems_of_rows.append(problem)
    return tuple(problems_of_rows)
