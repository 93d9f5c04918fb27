"""Benchmarks that a run of language models is measured on while it trains.

Every worker takes its share of the problems: the policies write answers with the engines that sample in training, and a
sandbox of the worker's own judges them. Random streams are functions of (seed, task id, sample), never those of training, so
that measurements of one run differ by the weights alone and change nothing of it.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marl_ray.config import BenchmarkConfig, RunConfig
from marl_ray.errors import FieldError, MarlRayError, one_line
from marl_ray.evaluation.benchmarks import Benchmark, ModelAnswer, Problem, benchmark
from marl_ray.evaluation.data_files import load_problems
from marl_ray.evaluation.options import WritingRequest
from marl_ray.evaluation.scoring.local import ResultRow, ScoringJob, make_pool, score_locally
from marl_ray.evaluation.scoring.report import make_report
from marl_ray.evaluation.writing.authors import Author, WriterPolicies
from marl_ray.evaluation.writing.requests import Row
from marl_ray.evaluation.writing.samples import Sample
from marl_ray.evaluation.writing.writer import Writer
from marl_ray.policies.agreement import all_gather_values
from marl_ray.policies.engines.base import Engine
from marl_ray.sandbox import Level
from marl_ray.training.collectives import rank_and_world_size

MAX_RUNS = 16
"""Maximum number of programs that a worker tests at once, so that their memory stays small; fewer on fewer cores."""


@dataclass(frozen=True)
class RunBenchmark:
    """A benchmark of a run, with its problems and the writer of the answers."""

    settings: BenchmarkConfig
    benchmark: Benchmark
    problems: tuple[Problem, ...]
    sha256: str
    """Digest of the file."""
    writer: Writer

    @property
    def ks(self) -> list[int]:
        """Values of k for pass@k."""
        return sorted({1, self.settings.samples})

    def is_due(self, iteration: int) -> bool:
        """Return True if it is measured after this iteration, wherever a run ends."""
        every = self.settings.every
        return iteration == 0 or (every is not None and iteration % every == 0)


def read_benchmarks(
    config: RunConfig,
    agents: Mapping[str, Sequence[str]],
    policies: Mapping[str, Author],
    engines: Mapping[str, Engine] | None = None,
) -> list[RunBenchmark]:
    """Return the run's benchmarks, read and checked.

    `agents` are policy -> its agents. Without `engines` they can be checked only.

    Raises FieldError naming the key, or MarlRayError naming the file and its line, or the first problem whose prompt
    is too long.
    """
    table = {agent: name for name, members in agents.items() for agent in members}
    authors = WriterPolicies(table, policies, config.env.model_dump(mode="json"), lambda name: (engines or {})[name])
    return [_read_benchmark(config, settings, authors) for settings in config.evaluation.benchmarks]


def _read_benchmark(config: RunConfig, settings: BenchmarkConfig, authors: WriterPolicies) -> RunBenchmark:
    loaded, section = benchmark(settings.name), f"evaluation.benchmarks.{settings.metric}"
    if "hardened" not in loaded.modes or loaded.filters_references:
        raise FieldError(f"{section}.name", "expected a benchmark with a hardened mode that does not filter references")
    request = WritingRequest(
        agent=settings.agent,
        num_samples=settings.samples,
        seed=config.seed,
        temperature=settings.temperature,
        prompt=settings.prompt,
    )
    try:
        data = load_problems(loaded, settings.data, settings.split, settings.sha256)
        if settings.problems is not None and settings.problems > len(data.problems):
            raise FieldError("problems", f"{data.source} has {len(data.problems)}, not {settings.problems}")
        problems = data.problems[: settings.problems]
        writer = Writer(request, loaded, authors)
        writer.manifest(problems)
    except FieldError as error:
        raise FieldError(f"{section}.{error.field}", error.message) from error
    except MarlRayError as error:
        raise MarlRayError(f"{section}: {error}") from error
    return RunBenchmark(settings, loaded, problems, data.sha256, writer)


def check_unchanged(benchmarks: Sequence[RunBenchmark], digests: dict[str, str]) -> None:
    """Compare the files with the `digests` of when the run began, by benchmark, and add those that are missing.

    Raises MarlRayError for a file that has changed: the curve would be of different problems.
    """
    for each in benchmarks:
        name, digest = each.settings.metric, each.sha256
        if digests.setdefault(name, digest) != digest:
            raise MarlRayError(
                f"evaluation.benchmarks.{name}.data: sha256 is {digest}, expected {digests[name]}, as when the run began"
            )


def curve_axes(config: RunConfig, tokens: float, seconds: float) -> dict[str, float]:
    """Return the axes of a benchmark's curve.

    The axes are the tokens trained on, the hours of sampling and updates, and, where it is known, the price of these.
    """
    hours, price = seconds / 3600, config.resources.hourly_price
    axes = {"benchmark/tokens": tokens, "benchmark/hours": hours}
    return axes if price is None else axes | {"benchmark/price": hours * price * config.resources.workers}


def measure(benchmarks: Sequence[RunBenchmark], run: str, iteration: int) -> dict[str, float]:
    """Measure the current weights; every worker takes part.

    A benchmark that cannot be measured is a line on stderr and the metric `benchmark/NAME/failed`, and training continues.
    Before the first iteration, when nothing is lost, it is a MarlRayError.
    """
    metrics: dict[str, float] = {}
    for each in benchmarks:
        try:
            metrics |= measure_pass_rates(each)
        except MarlRayError as error:
            if iteration == 0:
                raise
            metrics[f"benchmark/{each.settings.metric}/failed"] = 1.0
            if rank_and_world_size()[0] == 0:
                print(f"{run}, iteration {iteration}: {error}; training continues", file=sys.stderr, flush=True)
    return metrics


def measure_pass_rates(run_benchmark: RunBenchmark) -> dict[str, float]:
    """Return `benchmark/NAME/pass_at_K` with its 95 % interval over problems, `_low` and `_high`.

    Every worker takes part. Raises MarlRayError on all workers together if one of them could not write or
    judge its share.
    """
    name, (rank, workers) = run_benchmark.settings.metric, rank_and_world_size()
    verdicts: list[ResultRow] = []
    failure = ""
    try:
        verdicts = _judge_samples(run_benchmark, _write_answers(run_benchmark, run_benchmark.problems[rank::workers]))
    except (MarlRayError, OSError) as error:
        failure = f"worker {rank}: {one_line(error)}"
    parts = all_gather_values((verdicts, failure))
    failures = [failure for _, failure in parts if failure]
    if failures:
        raise MarlRayError(f"evaluation.benchmarks.{name} was not measured: {failures[0]}")
    rows = [row for worker_rows, _ in parts for row in worker_rows]
    report = make_report(
        {}, [problem.task_id for problem in run_benchmark.problems], rows, ("hardened",), run_benchmark.ks
    )
    metrics: dict[str, float] = {}
    # Variants are `hardened`, and what else the benchmark scores, such as `hardened base`.
    for variant, scores in report["scores"].items():
        prefix = f"benchmark/{name}/{'_'.join([*variant.split()[1:], ''])}"
        for number, score in scores.items():
            key = f"{prefix}{number.replace('@', '_at_')}"
            metrics |= {key: score["value"], f"{key}_low": score["low"], f"{key}_high": score["high"]}
    return metrics


def _write_answers(run_benchmark: RunBenchmark, problems: Sequence[Problem]) -> list[Row]:
    """Write all samples of the problems."""
    jobs = [(problem, sample) for problem in problems for sample in range(run_benchmark.settings.samples)]
    return [row for rows in run_benchmark.writer.write(jobs) for row in rows]


def _judge_samples(run_benchmark: RunBenchmark, rows: Sequence[Row]) -> list[ResultRow]:
    """Return the verdicts on written samples, without their texts, in their order."""
    problems = {problem.task_id: problem for problem in run_benchmark.problems}
    kind = run_benchmark.writer.kind
    jobs = [
        ScoringJob(
            "sample",
            Sample(problems[row["task_id"]], row["sample"], ModelAnswer(kind, row[kind])),
            ("hardened",),
            run_benchmark.benchmark.timeout_s,
        )
        for row in rows
    ]
    if not jobs:
        return []
    workers = min(MAX_RUNS, len(os.sched_getaffinity(0)), len(jobs))
    packages = frozenset[str]().union(*(problem.packages for problem in problems.values()))
    with make_pool(workers, packages, Level.PATHS) as pool:
        results = [row for batch in score_locally(pool, jobs, workers) for row in batch]
    texts = ("raw", "extracted")
    return [{key: value for key, value in row.items() if key not in texts} for row in results]
