"""`marl-ray submit`: runs and sweeps as Ray Jobs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer

from marl_ray.cli.cluster import PRINTER, submit_to_kuberay
from marl_ray.cli.documents.output import Json, only_result, show
from marl_ray.cli.options import (
    LOCAL_DASHBOARD,
    Address,
    Context,
    KubeRay,
    Namespace,
    Overrides,
    RunFile,
    SubmissionId,
    SweepFile,
    SweepOverrides,
)

submit_app = typer.Typer(help="Train or sweep as a job of a cluster.", no_args_is_help=True)


@submit_app.command("train")
def submit_train(
    config: RunFile,
    overrides: Overrides = None,
    address: Address = LOCAL_DASHBOARD,
    submission_id: SubmissionId = None,
    kuberay: KubeRay = None,
    context: Context = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Train as a Ray Job, or with --kuberay as a RayJob.

    It submits, follows the job's log, and exits with its status.
    """
    from marl_ray.runs.naming import load_named

    run, named_overrides = load_named(config, overrides or ())
    if len(named_overrides) > len(overrides or ()):  # every attempt of the job has the name that is made here
        print(f"{run.name}: the config has no name, and gets this one", file=sys.stderr)
    _submit("train", config, named_overrides, address, submission_id, kuberay, context, namespace, as_json)


@submit_app.command("sweep")
def submit_sweep(
    config: SweepFile,
    overrides: SweepOverrides = None,
    address: Address = LOCAL_DASHBOARD,
    submission_id: SubmissionId = None,
    kuberay: KubeRay = None,
    context: Context = None,
    namespace: Namespace = None,
    as_json: Json = False,
) -> None:
    """Sweep as a Ray Job, or with --kuberay as a RayJob.

    It submits, follows the job's log, and exits with its status.
    """
    _submit("sweep", config, overrides or (), address, submission_id, kuberay, context, namespace, as_json)


def _submit(
    kind: Literal["train", "sweep"],
    config: Path,
    overrides: Sequence[str],
    address: str,
    submission_id: str | None,
    kuberay: Path | None,
    context: str | None,
    namespace: str | None,
    as_json: bool,
) -> None:
    from marl_ray.cluster.jobs import new_submission_id, read_config, submit

    name = read_config(kind, config, overrides).name
    with only_result(as_json):
        if kuberay is not None:
            job, status = submit_to_kuberay(kind, config, overrides, kuberay, submission_id, context, namespace)
        else:
            job = submission_id or new_submission_id()
            status = submit(kind, config, overrides, address=address, listener=PRINTER, submission_id=job)
    show(as_json, {"name": name, "job": job, "status": status}, ())
    raise typer.Exit(status)
