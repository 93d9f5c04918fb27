"""`marl-ray runs`: list the runs of a storage, compare, resume and delete them."""

import shlex
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marl_ray.cli.completion import complete_run
from marl_ray.cli.documents.output import Json, only_result, show, table_lines
from marl_ray.cli.options import ResumeOverrides, Storage, named_as_options
from marl_ray.errors import MarlRayError

if TYPE_CHECKING:
    from marl_ray.runs.comparison import SeedGroup
    from marl_ray.runs.summary import RunDetails, RunSummary, Score

runs_app = typer.Typer(help="List, show, compare, resume and delete runs.", no_args_is_help=True)
RunName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a run, or its folder.", autocompletion=complete_run)
]


@runs_app.command("ls")
def list_runs(storage: Storage = "runs", as_json: Json = False) -> None:
    """List the runs and sweeps of a storage.

    A folder with a damaged file is left out, and a line on stderr names the file.
    """
    from marl_ray.runs.stored import list_stored, storage_hint
    from marl_ray.runs.summary import summary_of

    summaries, are_some_damaged = [], False
    for entry in list_stored(storage):
        try:
            summaries.append(summary_of(entry))
        except MarlRayError as error:  # one damaged folder hides no other
            are_some_damaged = True
            print(f"marl-ray: {error}", file=sys.stderr)
    heads = ("NAME", "STATE", "ALGORITHM", "ENVIRONMENT", "STEPS", "SCORE", "WHEN", "STORAGE")
    lines = (
        table_lines(heads, map(_summary_cells, summaries))
        if summaries
        else [f"no run under {storage!r} can be read"]
        if are_some_damaged
        else [f"no runs under {storage!r}{storage_hint(storage)}"]
    )
    show(as_json, summaries, lines)


@runs_app.command("show")
def show_run(
    name: RunName,
    storage: Storage = "runs",
    defaults: Annotated[bool, typer.Option("--all", help="Show the whole config, including defaults.")] = False,
    as_json: Json = False,
) -> None:
    """Show one run: scores, faults, bundle, files, given keys."""
    from marl_ray.runs.stored import find_run
    from marl_ray.runs.summary import details_of

    details = details_of(find_run(name, storage))
    show(as_json, details, _detail_lines(details, defaults))


@runs_app.command("logs")
def show_log(
    name: RunName,
    storage: Storage = "runs",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run has ended.")] = False,
) -> None:
    """Print the log of a run."""
    from marl_ray.runs.following import log_lines
    from marl_ray.runs.stored import find_run

    for line in log_lines(find_run(name, storage), follow):
        print(line, flush=True)


@runs_app.command("resume")
def resume(name: RunName, overrides: ResumeOverrides = None, storage: Storage = "runs", as_json: Json = False) -> None:
    """Resume a run from its last checkpoint.

    The config is that of the run's folder. To train a finished run on, raise `train.total_steps`.
    """
    from marl_ray.api.training import check_and_train
    from marl_ray.cli.training.train import result_lines, warn_of
    from marl_ray.config import RunConfig, parse_config
    from marl_ray.runs.stored import StoredRunState, find_run

    run = find_run(name, storage)
    if run.state() is StoredRunState.RUNNING:
        raise MarlRayError(
            f"run {run.name!r} is alive; `marl-ray runs logs {run.name} --follow` shows how it continues"
        )
    if "given" not in run.record:
        raise MarlRayError(f"run {run.name!r}: its folder does not have its config; train with its file again")
    config = parse_config(RunConfig, {**run.record["given"], "storage": run.storage}, overrides or (), source=run.uri)
    if config.name != run.name:
        raise MarlRayError(f"name={config.name}: a run is resumed under its name, {run.name}")
    with only_result(as_json):
        result = check_and_train(config)
    show(as_json, result, result_lines(result))
    warn_of(config)


@runs_app.command("rm")
def remove_run(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of a run or a sweep, or its folder.", autocompletion=complete_run),
    ],
    storage: Storage = "runs",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the folder of a run or a sweep that is not alive.

    It says what it deletes, and asks. The MLflow runs and the registered models stay.
    """
    from marl_ray.runs.removal import contents_of, remove_folder
    from marl_ray.runs.stored import find_entry

    entry = find_entry(name, storage)
    contents = contents_of(entry)
    what = (
        f"{contents.folder}: {contents.files} files, {contents.bytes / 1e6:,.1f} MB, {contents.checkpoints} checkpoints"
    )
    typer.echo(f"{what}; MLflow runs and registered models stay", err=True)
    if not yes and not typer.confirm(f"Delete {entry.kind} {entry.name}?", err=True):
        raise typer.Exit(1)
    remove_folder(entry)
    show(as_json, contents, [f"{entry.name} is deleted"])


@runs_app.command("compare")
@named_as_options()
def compare_runs(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of runs.", autocompletion=complete_run)],
    storage: Storage = "runs",
    metric: Annotated[
        str | None, typer.Option(help="Metric of metrics.jsonl; eval/return, or else return, by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The PNG file of the plot.")] = Path("comparison.png"),
    as_json: Json = False,
) -> None:
    """Compare runs in one plot and a table.

    Runs that differ in their seed alone are one row, with the interval over seeds. Below the table are the keys of the
    config in which the rows differ.
    """
    from marl_ray.api.comparing import compare
    from marl_ray.runs.comparison import METRICS
    from marl_ray.runs.plot import key_difference

    comparison = compare(names, storage=storage, metric=metric)
    comparison.plot(out)
    groups, shared_metric = comparison.groups, comparison.metric
    heads = (
        "RUN",
        "ALGORITHM",
        "SEED",
        "STEPS",
        "SCORE" if shared_metric in METRICS else "VALUE",
        "95 % INTERVAL",
        "OF",
    )
    rows = [row for group in groups for row in _group_rows(group)]
    differing = [
        f"{group.label}: {', '.join(key_difference(key, value) for key, value in group.differences.items())}"
        for group in groups
        if group.differences
    ]
    lines = [*table_lines(heads, rows), *differing, f"{shared_metric} over environment steps: {out}"]
    show(as_json, {"metric": shared_metric, "picture": out, "groups": groups}, lines)


def _summary_cells(run: "RunSummary") -> list[str]:
    total = "" if run.total_steps is None else f" of {run.total_steps:,}"
    when = "" if not run.at else datetime.fromtimestamp(run.at).astimezone().isoformat(" ", "minutes")[:16]
    return [
        run.name,
        run.state if run.kind == "run" else f"{run.kind}, {run.state}",
        run.algorithm,
        run.env,
        f"{run.steps:,}{total}",
        _score_text(run.score),
        when,
        run.storage,
    ]


def _score_text(score: "Score | None") -> str:
    if score is None:
        return "-"
    return f"{score.value:.3f}{_interval_text(score)}"


def _interval_text(score: "Score") -> str:
    return "" if score.low is None or score.high is None else f" [{score.low:.3f}, {score.high:.3f}]"


def _group_rows(group: "SeedGroup") -> Iterator[list[str]]:
    """Yield a row for each run, and one for their mean where there are several."""
    for curve in group.runs:
        yield [curve.name, curve.algorithm, str(curve.seed), f"{curve.points[-1][0]:,}", *_score_cells(curve.score)]
    if len(group.runs) > 1:
        seeds = " ".join(str(curve.seed) for curve in group.runs)
        yield ["  these together", group.runs[0].algorithm, seeds, "", *_score_cells(group.score)]


def _score_cells(score: "Score | None") -> list[str]:
    return (
        ["-", "-", "-"]
        if score is None
        else [f"{score.value:.3f}", _interval_text(score).strip() or "-", score.episodes]
    )


def _model_option(details: "RunDetails") -> str:
    """Return the model as `marl-ray evaluate --policy` takes it.

    The option of its registry follows where that is not the default. Empty if there is no model.
    """
    from marl_ray.config import resolve_tracking_uri

    uri = details.mlflow["uri"]
    if not details.model or uri is None or uri == resolve_tracking_uri():
        return details.model or ""
    return f"{details.model} --tracking-uri {shlex.quote(uri)}"


def _detail_lines(details: "RunDetails", defaults: bool) -> Iterator[str]:
    import yaml

    from marl_ray.runs.stored import StoredRunState

    run = details.summary
    total = f"{run.steps:,} of {run.total_steps:,} steps"
    yield f"{run.name}: {run.state}, {run.algorithm} on {run.env}, seed {run.seed}, {total}"
    if details.error and run.state == StoredRunState.FAILED:
        yield f"  error       {details.error}"
    if run.state not in (StoredRunState.FINISHED, StoredRunState.RUNNING):
        begins = "from its last checkpoint" if details.checkpoints else "anew: no checkpoint has been written"
        yield f"  continues   with `marl-ray runs resume {run.name}`, {begins}"
    if run.score is not None:
        yield f"  score       {_score_text(run.score)} ({run.score.episodes})"
    for sentence in details.warnings:
        yield f"  warning     {sentence}"
    shown = dict(details.config if defaults or not details.given else details.given)
    yield "  config" if shown == details.config else "  config      as given; --all shows the defaults too"
    for line in yaml.safe_dump(shown, sort_keys=False).splitlines():
        yield f"    {line}"
    for what, value in (("bundle", details.bundle), ("model", _model_option(details)), ("curve", details.curve)):
        if value:
            yield f"  {what:<11} {value}"
    for checkpoint in details.checkpoints:
        yield f"  checkpoint  step {checkpoint['steps']:,}: {checkpoint['path']}"
    if details.mlflow["run_id"]:
        where = f" in {details.mlflow['uri']}" if details.mlflow["uri"] else ""
        yield f"  MLflow      run {details.mlflow['run_id']}{where}"
    if details.log:
        yield f"  log         {details.log}"
    for path in details.errors:
        yield f"  traceback   {path}"
