"""`marl-ray sweep` and `marl-ray report`: many runs, and the page about them."""

import itertools
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from marl_ray.cli.documents.output import Json, only_result, show
from marl_ray.cli.options import SweepFile, SweepOverrides
from marl_ray.errors import MarlRayError, one_line

if TYPE_CHECKING:
    from marl_ray.config.sweep import SweepConfig

Retry = Annotated[
    bool, typer.Option("--retry", help="Restart failed and lost trials from their last checkpoints, and refused ones.")
]


def sweep(
    config: SweepFile,
    overrides: SweepOverrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, list the trials, and stop.")] = False,
    retry: Retry = False,
    as_json: Json = False,
) -> None:
    """Train many configurations and find the best.

    The same command continues a sweep that was killed.
    """
    from marl_ray.api.sweeping import check_and_sweep
    from marl_ray.config.sweep import load_sweep
    from marl_ray.tuning.records import values_line

    sweep_config = load_sweep(config, overrides or ())
    if dry_run:
        from marl_ray.tuning.search.metric_names import unchecked_metrics

        trials = _planned_trials(sweep_config)
        for name in unchecked_metrics(sweep_config):
            note = "is a number of the environment; the first trial says whether it is reported"
            print(f"{sweep_config.name}: metric {name} {note}", file=sys.stderr)
        plan = {"trials": trials, "seeds": sweep_config.seeds}
        plan |= {"scheduler": sweep_config.scheduler.kind, "search": sweep_config.search.kind}
        lines = [f"{number:04d}  {values_line(values)}" for number, values in enumerate(trials)]
        seeds = ", ".join(map(str, sweep_config.seeds))
        show(as_json, plan, [*lines, f"seeds {seeds}; scheduler {plan['scheduler']}; search {plan['search']}"])
        return
    with only_result(as_json):
        result = check_and_sweep(sweep_config, retry)
    show(as_json, result.document(), str(result).splitlines())
    if result.records.winner is None:
        raise typer.Exit(1)


def report(
    sweep: Annotated[str, typer.Argument(metavar="SWEEP", help="A sweep's folder, or its name under the storage.")],
    storage: Annotated[str, typer.Option(help="Folder or URI that holds the sweep's folder.")] = "runs",
    as_json: Json = False,
) -> None:
    """Write the report of a sweep as one HTML file.

    The file lies in the sweep's folder. The sweep may still run, or have been killed.
    """
    from marl_ray.tuning.lookup import find_sweep
    from marl_ray.tuning.reporting.report import write_report

    try:
        path = write_report(*find_sweep(sweep, storage))
    except OSError as error:
        raise MarlRayError(f"the report of sweep {sweep!r} cannot be written: {one_line(error)}") from error
    show(as_json, {"report": path}, [str(path)])


def _planned_trials(sweep_config: "SweepConfig") -> list[dict[str, object]]:
    """Return the configurations that would run, of an endless search the first ten."""
    from marl_ray.tuning.running.driver import check_sweep
    from marl_ray.tuning.search.spaces import SEARCHES

    check_sweep(sweep_config)
    search = SEARCHES[sweep_config.search.kind](sweep_config)
    max_trials = sweep_config.budget.trials or (10**6 if sweep_config.search.kind == "grid" else 10)
    return list(itertools.takewhile(lambda values: values is not None, map(search.propose, range(max_trials))))  # type: ignore[arg-type]
