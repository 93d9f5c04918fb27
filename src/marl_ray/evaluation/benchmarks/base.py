"""What every benchmark is: problems that score samples, and the facts that name its variant."""

import ast
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from marl_ray.envs.text.record_files import FileRow
from marl_ray.errors import MarlRayError
from marl_ray.rewards.code import CallTest, CodeTask
from marl_ray.rewards.extraction import extract
from marl_ray.sandbox import Pool

Mode = Literal["official", "hardened"]
Kind = Literal["completion", "solution", "output"]
KINDS: tuple[Kind, ...] = ("completion", "solution", "output")
NO_TESTS = (CallTest("pass"),)
"""Stands for the hidden tests where a task that is shown to policies must have some."""


@dataclass(frozen=True)
class ModelAnswer:
    """What a model gave for a problem: the continuation of its prompt, a whole program, or an answer with code in it."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class SampleVerdict:
    """What one mode said of one sample."""

    passed: bool
    result: str
    """`passed`, or why not."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    level: str = ""
    """Level of the sandbox that it ran at; empty where nothing was run."""
    flags: tuple[str, ...] = ()
    """What a static scan noticed; only where judge and program share an interpreter."""
    scores: Mapping[str, bool] = field(default_factory=dict)
    """Whether further scores of the benchmark count it as passed, by their names: `base` of EvalPlus."""


Verdicts = Mapping[Mode, SampleVerdict]


@dataclass(frozen=True)
class Problem(ABC):
    """One problem, with its tests."""

    task_id: str
    prompt: str
    """What a policy is shown."""
    entry_point: str
    """The function under test; empty where the whole program is."""
    references: tuple[str, ...] = field(repr=False)
    """Whole programs that are said to be correct."""

    @property
    def runs(self) -> float:
        """At most so many times the time limit does one mode take."""
        return 1.0

    @property
    def packages(self) -> frozenset[str]:
        """Installed packages that programs may import beside the standard library."""
        return frozenset({"numpy"})

    @property
    def modes(self) -> tuple[Mode, ...]:
        """In which modes it can be judged."""
        return ("official", "hardened")

    @property
    def shown(self) -> CodeTask:
        """The tests that a policy may know, as public ones: those that the prompt shows or the file calls public.

        What is hidden in it is not a test of this problem.
        """
        return CodeTask(NO_TESTS if self.entry_point else (), entry_point=self.entry_point)

    @abstractmethod
    def score(self, pool: Pool, source: ModelAnswer, modes: Sequence[Mode], timeout_s: float) -> Verdicts:
        """Run the tests on a sample, once for each of these modes. `source` is a completion or a solution."""


@dataclass(frozen=True)
class Benchmark:
    """How a benchmark's files are read and what its numbers are called."""

    name: str
    title: str
    parse: Callable[[Iterable[FileRow]], tuple[Problem, ...]]
    """Rows of a file to problems, in the file's order. Raises MarlRayError naming the row."""
    modes: tuple[Mode, ...]
    timeout_s: float
    """The official limit of one sample (CodeContests: of one test)."""
    ks: tuple[int, ...]
    """What is reported when no k is asked for."""
    known: Mapping[str, str]
    """sha256 of a file to what it is. Empty: any file will do."""
    splits: Mapping[str, Callable[[Problem], bool]] = field(default_factory=lambda: {"all": lambda _: True})
    """Name to which problems are in it; the first is taken when none is asked for."""
    filters_references: bool = False
    """Problems whose own references all fail are left out, and counted."""
    same_id: Callable[[str], str] = lambda task_id: task_id
    """Other ways to write a task id, made the one way."""
    data: str | None = None
    """Where the problems are from when no `--data` is given."""
    hub: tuple[str, str | None, tuple[str, ...]] | None = None
    """Data set, its configuration and splits on the Hugging Face hub."""
    writes: Kind = "solution"
    """What a policy without a chat template writes: the `completion` of a prompt, or a whole `solution`."""
    stop: tuple[str, ...] = ()
    """Where a policy that continues the prompt is done."""
    notes: str = ""
    """What else makes the number this number; part of the variant's name."""


def program_of(problem: Problem, source: ModelAnswer) -> ModelAnswer | None:
    """The source to score: code is extracted from an answer. None where the answer has no complete block."""
    if source.kind != "output":
        return source
    code = extract(source.text, problem.entry_point)
    return None if code is None else ModelAnswer("solution", code)


class BenchmarkRecord(BaseModel):
    """Base of the records of official files. A field that is not listed is refused: it may hold tests that would not run.

    A field that is listed and not used has the type `Unused`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Unused = Any


def syntax(code: str) -> ast.Module:
    """The syntax tree of trusted code; quiet about the invalid escapes in the data. Raises SyntaxError."""
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(code)


def unique(problems: Iterable[tuple[FileRow, Problem]]) -> tuple[Problem, ...]:
    """The problems. Raises MarlRayError where a task id comes twice, or there is none."""
    seen: dict[str, str] = {}
    found = []
    for row, problem in problems:
        if problem.task_id in seen:
            raise MarlRayError(f"{row.where}: task_id {problem.task_id!r} is already that of {seen[problem.task_id]}")
        seen[problem.task_id] = row.where
        found.append(problem)
    return tuple(found)
