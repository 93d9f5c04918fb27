"""The commands of sweeps."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marl_ray.cli.options import LOCAL_DASHBOARD, Address, Context, KubeRay, Namespace, SubmissionId
from marl_ray.errors import MarlRayError, one_line

if TYPE_CHECKING:
    from marl_ray.config.sweep import SweepConfig
    from marl_ray.tuning.running.driver import SweepResult

SweepFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the sweep.")]
SweepOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as budget.trials=20 or run.hyper.lr=3e-4."),
]
Retry = Annotated[bool, typer.Option("--retry", help="Take up trials again that failed, where they were.")]


def register(app: typer.Typer, submit_app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(sweep)
    app.command()(report)
    submit_app.command("sweep")(submit_sweep)


def sweep(
    config: SweepFile,
    overrides: SweepOverrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, list the trials, and stop.")] = False,
    retry: Retry = False,
) -> None:
    """Train many configurations and find the best. The same command continues a sweep that was killed."""
    from marl_ray.config.sweep import load_sweep
    from marl_ray.tuning.records import shown

    loaded = load_sweep(config, overrides or ())
    if dry_run:
        _list(loaded)
        return
    result = _sweep_here(loaded, retry)
    records = result.records
    counts: dict[str, int] = {}
    for record in records.trials:
        status = record.status or record.state
        counts[status] = counts.get(status, 0) + 1
    kinds = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"{result.name}: {len(records.trials)} trials ({kinds}), {records.played:,} steps, {records.seconds:.0f} s")
    if records.error:
        print(f"  {records.error}")
    if result.report:
        print(f"  report  {result.report}")
    if records.winner is None:
        print("  no winner: no trial has a result")
        raise typer.Exit(1)
    winner = records.trials[records.winner]
    scores = ", ".join(f"{m.name} {v:.4g}" for m, v in zip(loaded.metric, winner.objectives or [], strict=False))
    print(f"  winner  trial {winner.number:04d} ({shown(winner.values)}): {scores}")
    if records.winner_model:
        print(f"  bundle  {records.winner_model}")
    print(f"  records {result.folder}/sweep.json")


def report(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep's folder, or its name under the storage.")],
    storage: Annotated[str, typer.Option(help="Folder or URI that has the sweep's folder.")] = "runs",
) -> None:
    """Write the report of a sweep, one HTML file in its folder. The sweep may still run, or have been killed."""
    from marl_ray.tuning.records import find_sweep
    from marl_ray.tuning.reporting.report import write_report

    try:
        print(write_report(*find_sweep(sweep, storage)))
    except OSError as error:
        raise MarlRayError(f"the report of sweep {sweep!r} cannot be written: {one_line(error)}") from error


def submit_sweep(
    config: SweepFile,
    overrides: SweepOverrides = None,
    address: Address = LOCAL_DASHBOARD,
    submission_id: SubmissionId = None,
    kuberay: KubeRay = None,
    context: Context = None,
    namespace: Namespace = None,
) -> None:
    """Sweep as a Ray Job, or with --kuberay as a RayJob: submit, follow its log, exit with its status."""
    if kuberay is not None:
        from marl_ray.cli.cluster import submit_to_kuberay

        parts = (kuberay, submission_id, context, namespace)
        raise typer.Exit(submit_to_kuberay("sweep", config, overrides or (), *parts))
    from marl_ray.cluster.jobs import submit

    raise typer.Exit(submit("sweep", config, overrides or (), address=address, submission_id=submission_id))


def _list(loaded: "SweepConfig") -> None:
    """Print the configurations that would run; of an endless search the first ones."""
    from marl_ray.tuning.records import shown
    from marl_ray.tuning.search.schedulers import make_scheduler
    from marl_ray.tuning.search.spaces import SEARCHES, check_space

    check_space(loaded)
    make_scheduler(loaded, loaded.example().train.total_steps)
    search = SEARCHES[loaded.search.kind](loaded)
    most = loaded.budget.trials or (10**6 if loaded.search.kind == "grid" else 10)
    for number in range(most):
        values = search.ask(number)
        if values is None:
            break
        print(f"{number:04d}  {shown(values)}")
    print(f"seeds {', '.join(map(str, loaded.seeds))}; scheduler {loaded.scheduler.kind}; search {loaded.search.kind}")


def _sweep_here(loaded: "SweepConfig", retry: bool) -> "SweepResult":
    from marl_ray.cluster.local_ray import ray_here
    from marl_ray.tuning.running.driver import check_sweep, run_sweep

    check_sweep(loaded)
    return run_sweep(loaded, retry, ray_here)
