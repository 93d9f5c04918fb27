"""Read files of samples, which have one JSON object a line.

    {"task_id": "HumanEval/0", "completion": "    return 1"}

An object has one of the keys `completion`, `solution` and `output`.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.benchmarks.base import ANSWER_KINDS, Benchmark, ModelAnswer, Problem
from marl_ray.stored_files.record_files import FileRow, read_bytes, read_records


@dataclass(frozen=True)
class Sample:
    """One answer to one problem."""

    problem: Problem
    number: int
    """Index of the sample among the samples of its problem, in the file's order, from 0."""
    source: ModelAnswer


@dataclass(frozen=True)
class Samples:
    """All answers of a file."""

    samples: tuple[Sample, ...]
    path: str
    sha256: str

    @property
    def counts(self) -> Counter[str]:
        """Number of samples by problem."""
        return Counter(sample.problem.task_id for sample in self.samples)


def read_samples(path: str, benchmark: Benchmark, problems: tuple[Problem, ...]) -> Samples:
    """Read a file of samples; every problem must have one, as the official harness demands.

    Raises MarlRayError naming the file and line of a row that is no sample of these problems, or a problem
    without samples.
    """
    data = read_bytes(path)
    by_id = {problem.task_id: problem for problem in problems}
    counts: Counter[str] = Counter()
    samples = []
    for row in read_records(path, data):
        task_id, source = _read_sample(row)
        task_id = benchmark.canonical_id(task_id)
        if task_id not in by_id:
            raise MarlRayError(f"{row.where}: task_id {task_id!r} is not among the {len(problems)} problems")
        samples.append(Sample(by_id[task_id], counts[task_id], source))
        counts[task_id] += 1
    unanswered = [task_id for task_id in by_id if task_id not in counts]
    if unanswered:
        raise MarlRayError(
            f"{path}: {len(unanswered)} of {len(problems)} problems have no sample, such as {unanswered[0]!r}"
        )
    return Samples(tuple(samples), path, hashlib.sha256(data).hexdigest())


def _read_sample(row: FileRow) -> tuple[str, ModelAnswer]:
    if not isinstance(row.values, dict):
        raise MarlRayError(f"{row.where}: expected a JSON object")
    task_id = row.values.get("task_id")
    if not isinstance(task_id, str | int) or isinstance(task_id, bool):
        raise MarlRayError(f"{row.where}: task_id: expected a string or a number")
    kinds = [kind for kind in ANSWER_KINDS if kind in row.values]
    if len(kinds) != 1:
        raise MarlRayError(f"{row.where}: expected exactly one of {', '.join(ANSWER_KINDS)}")
    text = row.values[kinds[0]]
    if not isinstance(text, str):
        raise MarlRayError(f"{row.where}: {kinds[0]}: expected a string")
    return str(task_id), ModelAnswer(kinds[0], text)
