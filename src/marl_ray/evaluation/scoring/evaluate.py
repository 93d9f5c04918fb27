"""Evaluate samples on a code benchmark."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from marl_ray.deadlines.seconds import EXPECTED_SECONDS, are_seconds
from marl_ray.errors import FieldError
from marl_ray.evaluation.benchmarks import Benchmark, Mode, ModelAnswer, Problem, benchmark
from marl_ray.evaluation.benchmarks.jsonl import JSONL
from marl_ray.evaluation.data_files import SHORT_DIGEST, BenchmarkData, load_problems
from marl_ray.evaluation.options import Progress, ScoringOptions, no_progress
from marl_ray.evaluation.scoring.local import JobKind, ResultRow, Scorer, ScoringJob
from marl_ray.evaluation.scoring.report import MARKDOWN_FILE, REPORT_FILE, make_report, markdown
from marl_ray.evaluation.scoring.results import ResultsFile, open_results
from marl_ray.evaluation.writing.samples import Sample, Samples, read_samples
from marl_ray.json_types import JsonObject
from marl_ray.sandbox import Level
from marl_ray.stored_files.temporary_files import replace_file


@dataclass(frozen=True)
class ScoringTask:
    """A benchmark with its problems, modes and limit, checked; samples are scored on it."""

    name: str
    """The benchmark's name or `package.module:NAME`."""
    benchmark: Benchmark
    data: BenchmarkData
    modes: tuple[Mode, ...]
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """A checked evaluation: nothing in its input can fail any more."""

    benchmark: Benchmark
    data: BenchmarkData
    samples: Samples
    modes: tuple[Mode, ...]
    ks: tuple[int, ...]
    """The k of each pass@k."""
    timeout_s: float
    """CPU seconds of one run of a program."""
    min_level: Level
    """The weakest confinement in which programs may run."""
    folder: Path
    """Folder of the manifest, the results and the report."""
    manifest: JsonObject
    """Facts that may not change when the evaluation is continued (see `results`)."""

    @property
    def packages(self) -> frozenset[str]:
        """Packages that programs may import, if they are installed."""
        return frozenset().union(*(problem.packages for problem in self.data.problems))


def choose_ks(counts: Mapping[str, int], ks: Sequence[int] | None, default: Sequence[int]) -> tuple[int, ...]:
    """Choose the values of k to report; `counts` are the numbers of samples by problem.

    Without `ks`, they are those of `default` for which every problem has enough samples, as in the official
    harness. Raises FieldError naming a problem with fewer samples than a wanted k.
    """
    task_id, fewest = min(counts.items(), key=lambda item: item[1])
    if ks is None:
        return tuple(k for k in default if k <= fewest)
    for k in ks:
        if k < 1:
            raise FieldError("k", f"expected at least 1, got {k}")
        if k > fewest:
            raise FieldError("k", f"problem {task_id!r} has only {fewest} sample{'' if fewest == 1 else 's'}, not {k}")
    return tuple(sorted(set(ks)))


def read_task(options: ScoringOptions) -> ScoringTask:
    """Read and check everything but samples.

    Raises FieldError naming the option, or MarlRayError naming the file and line.
    """
    name, colon, file = options.benchmark.partition(":")
    if name != JSONL.name:
        name, file = options.benchmark, ""
    elif colon and options.data is not None:
        raise FieldError(
            "benchmark", f"expected {JSONL.name} and data, or {JSONL.name}:FILE, got {options.benchmark} and data"
        )
    scored = benchmark(name)
    modes = _choose_modes(scored, options.mode)
    timeout_s = scored.timeout_s if options.timeout_s is None else options.timeout_s
    if not are_seconds(timeout_s):
        raise FieldError("timeout_s", f"expected {EXPECTED_SECONDS}, got {timeout_s!r}")
    return ScoringTask(
        name, scored, load_problems(scored, file or options.data, options.split, options.sha256), modes, timeout_s
    )


def prepare_evaluation(
    options: ScoringOptions, task: ScoringTask | None = None, samples_description: str = ""
) -> EvaluationPlan:
    """Read and check everything that an evaluation needs.

    `task` is the result of `read_task`, if it was called before; `samples_description` describes the samples, if that is
    known. Raises FieldError naming the option, or MarlRayError naming the file and line.
    """
    task = task or read_task(options)
    scored = task.benchmark
    data = task.data
    modes = task.modes
    timeout_s = task.timeout_s
    samples = read_samples(options.samples, scored, data.problems)
    ks = choose_ks(samples.counts, options.k, scored.ks)
    kinds = " and ".join(sorted({f"{sample.source.kind}s" for sample in samples.samples}))
    limit = f"{timeout_s:g} s" + ("" if timeout_s == scored.timeout_s else f" instead of {scored.timeout_s:g} s")
    manifest = {
        "benchmark": scored.name,
        "variant": f"{data.variant}; {samples_description or f'ready {kinds}'}; {limit}",
        "data": data.source,
        "data_sha256": data.sha256,
        "samples": samples.path,
        "samples_sha256": samples.sha256,
        "modes": list(modes),
        "timeout_s": timeout_s,
        "min_level": options.min_level.name.lower(),
    }
    folder = options.out or Path("runs/evaluations", f"{scored.name}-{samples.sha256[:SHORT_DIGEST]}")
    return EvaluationPlan(
        benchmark=scored,
        data=data,
        samples=samples,
        modes=modes,
        ks=ks,
        timeout_s=timeout_s,
        min_level=options.min_level,
        folder=folder,
        manifest=manifest,
    )


def _choose_modes(scored: Benchmark, requested: str | None) -> tuple[Mode, ...]:
    if requested in (None, "both") and (requested is None or len(scored.modes) == 2):
        return scored.modes
    modes = tuple(mode for mode in scored.modes if mode == requested)
    if not modes:
        both = ", both" if len(scored.modes) == 2 else ""
        raise FieldError("mode", f"{scored.name} has {', '.join(scored.modes)}{both}, not {requested}")
    return modes


def evaluate(
    plan: EvaluationPlan, scorer: AbstractContextManager[Scorer], progress: Progress = no_progress
) -> dict[str, object]:
    """Score what is not scored yet, then write and return the report.

    However this ends, all finished scores stay in the folder, and the same call continues from there.
    """
    with open_results(plan.folder, plan.manifest) as results, scorer as run:
        filtered, unchecked = [], 0
        if plan.benchmark.filters_references:
            filtered = _failing_references(plan, results, run, progress)
            unchecked = sum(not problem.references for problem in plan.data.problems)
        left_out = set(filtered)
        selected = [sample for sample in plan.samples.samples if sample.problem.task_id not in left_out]
        _score(plan, results, run, "sample", selected, progress)
        report = make_report(
            plan.manifest,
            [problem.task_id for problem in plan.data.problems],
            [row for (kind, *_), row in results.rows.items() if kind == "sample"],
            plan.modes,
            plan.ks,
            filtered,
            unchecked,
        )
    replace_file(plan.folder / REPORT_FILE, (json.dumps(report, indent=2) + "\n").encode())
    replace_file(plan.folder / MARKDOWN_FILE, markdown(report).encode())
    return report


def _failing_references(plan: EvaluationPlan, results: ResultsFile, run: Scorer, progress: Progress) -> list[str]:
    """Return the problems whose references all fail.

    A problem's next reference runs only if the one before has failed.
    """
    open_problems = [problem for problem in plan.data.problems if problem.references]
    failing: list[Problem] = []
    number = 0
    while open_problems:
        tried = [
            Sample(problem, number, ModelAnswer("solution", problem.references[number])) for problem in open_problems
        ]
        _score(plan, results, run, "reference", tried, progress)
        failed = [p for p in open_problems if not _passes(plan, results.rows["reference", p.task_id, number])]
        number += 1
        open_problems = [problem for problem in failed if len(problem.references) > number]
        failing += [problem for problem in failed if len(problem.references) <= number]
    names = {problem.task_id for problem in failing}
    return [problem.task_id for problem in plan.data.problems if problem.task_id in names]


def _passes(plan: EvaluationPlan, row: ResultRow) -> bool:
    return all(row[mode]["passed"] for mode in plan.modes if row[mode])


def _score(
    plan: EvaluationPlan,
    results: ResultsFile,
    run: Scorer,
    kind: JobKind,
    samples: Sequence[Sample],
    progress: Progress,
) -> None:
    jobs = [
        ScoringJob(kind, sample, plan.modes, plan.timeout_s)
        for sample in samples
        if (kind, sample.problem.task_id, sample.number) not in results.rows
    ]
    done = len(samples) - len(jobs)
    progress(kind, done, len(samples))
    for rows in run(jobs):
        results.add(rows)
        done += len(rows)
        progress(kind, done, len(samples))
