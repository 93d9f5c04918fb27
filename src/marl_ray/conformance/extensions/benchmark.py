"""Checks benchmarks by their problems, and by their verdicts on answers that must pass or must not."""

import os
import pickle
from collections.abc import Iterator, Sequence

from marl_ray.conformance.extensions.properties import (
    CheckedProperty,
    check_property,
    load_part,
    refuse_unknown_settings,
)
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks import Benchmark, ModelAnswer, Problem, benchmark
from marl_ray.evaluation.data_files import ANY_DIGEST, load_problems
from marl_ray.evaluation.scoring.local import ScoringJob, make_pool, score_locally
from marl_ray.evaluation.writing.samples import Sample
from marl_ray.extensions import BENCHMARK
from marl_ray.json_types import JsonMapping
from marl_ray.sandbox import Level

MAX_PROBLEMS = 20
"""Problems whose answers are scored, the first of the file."""


def check(name: str, settings: JsonMapping) -> Iterator[CheckedProperty]:
    """Read the problems of `data` (the benchmark's own file when not given) and of `split`, and score some answers."""
    refuse_unknown_settings("benchmark", settings, "data", "split")
    load_part(BENCHMARK, name)
    tested, problems = benchmark(name), list[Problem]()

    def read() -> str | None:
        problems.extend(load_problems(tested, settings.get("data"), settings.get("split"), ANY_DIGEST).problems)
        return None

    readable = check_property("problems", "its file is read, and has problems", read)
    yield readable
    if readable.failure is not None:
        return
    yield check_property("names", "every problem has a text, and an id of its own", lambda: _check_names(problems))
    yield check_property(
        "modes", "problems are judged in the benchmark's modes", lambda: _check_modes(tested, problems)
    )
    yield check_property("workers", "problems can be sent to other processes", lambda: _check_pickling(problems))
    yield check_property(
        "references", "a reference of every problem passes", lambda: _check_references(tested, problems[:MAX_PROBLEMS])
    )
    yield check_property(
        "empty answers", "an empty answer does not pass", lambda: _check_empty_answers(tested, problems[:MAX_PROBLEMS])
    )


def _check_names(problems: Sequence[Problem]) -> str | None:
    seen = set()
    for problem in problems:
        if not problem.prompt.strip():
            return f"the prompt of {problem.task_id!r} is empty"
        if problem.task_id in seen:
            return f"task_id {problem.task_id!r} is given twice"
        seen.add(problem.task_id)
    return None


def _check_modes(tested: Benchmark, problems: Sequence[Problem]) -> str | None:
    if not tested.modes:
        return "modes is empty"
    for problem in problems:
        if not set(problem.modes) & set(tested.modes):
            return f"{problem.task_id!r} has modes {problem.modes}, the benchmark {tested.modes}"
    return None


def _check_pickling(problems: Sequence[Problem]) -> str | None:
    copies = pickle.loads(pickle.dumps(tuple(problems)))  # noqa: S301  made here
    return None if copies == tuple(problems) else "pickled problems differ"


def _check_references(tested: Benchmark, problems: Sequence[Problem]) -> str | None:
    open_problems = [problem for problem in problems if problem.references]
    for number in range(max((len(problem.references) for problem in open_problems), default=0)):
        samples = [
            Sample(problem, number, ModelAnswer("solution", problem.references[number]))
            for problem in open_problems
            if number < len(problem.references)
        ]
        passed = _passed_ids(tested, samples)
        open_problems = [problem for problem in open_problems if problem.task_id not in passed]
    return f"no reference of {open_problems[0].task_id!r} passes" if open_problems else None


def _check_empty_answers(tested: Benchmark, problems: Sequence[Problem]) -> str | None:
    passed = _passed_ids(tested, [Sample(problem, 0, ModelAnswer("solution", "")) for problem in problems])
    return f"an empty answer to {min(passed)!r} passes" if passed else None


def _passed_ids(tested: Benchmark, samples: Sequence[Sample]) -> set[str]:
    """Return the ids of the problems whose sample passes in every mode."""
    jobs = [ScoringJob("sample", sample, tested.modes, tested.timeout_s) for sample in samples]
    workers = len(os.sched_getaffinity(0))
    packages = frozenset[str]().union(*(sample.problem.packages for sample in samples))
    with make_pool(workers, packages, Level.LIMITS) as pool:
        rows = [row for batch in score_locally(pool, jobs, workers) for row in batch]
    if len(rows) != len(jobs):
        raise MarlRayError(f"{len(rows)} verdicts on {len(jobs)} samples")
    return {row["task_id"] for row in rows if all(row[mode]["passed"] for mode in tested.modes if row[mode])}
