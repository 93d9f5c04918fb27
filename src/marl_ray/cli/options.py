"""Arguments and options that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from marl_ray.cli.completion import complete_override
from marl_ray.errors import FieldError, MarlRayError

LOCAL_DASHBOARD = "http://127.0.0.1:8265"
LOCAL_GATEWAY = "http://127.0.0.1:8000"
LOCAL_DATABASE = "sqlite:///runs/experiments.db"
KEY_NEEDED = "It needs an admin key in MARL_RAY_API_KEY."

RunFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Dotted overrides, such as hyper.lr=3e-4.",
        autocompletion=complete_override,
    ),
]
ResumeOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides of `train.total_steps`, `resources`, `checkpoint` and `tracking`; another value of any other key is "
        "another run.",
        autocompletion=complete_override,
    ),
]
SweepFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the sweep.")]
SweepOverrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, such as budget.trials=20 or run.hyper.lr=3e-4."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and stop.")]
Storage = Annotated[str, typer.Option(help="Folder or URI that holds the runs' folders.")]
Address = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="URL of the cluster's dashboard.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; its current one by default.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace; the context's by default.")]
KubeRay = Annotated[
    Path | None,
    typer.Option("--kuberay", metavar="CLUSTER", help="Config of a cluster: run as a RayJob on one of its own."),
]
SubmissionId = Annotated[str | None, typer.Option(help="Name of the job; submitting it twice joins the first.")]
GatewayUrl = Annotated[str, typer.Option("--url", envvar="MARL_RAY_GATEWAY", help="The gateway's address.")]
DatabaseUrl = Annotated[str, typer.Option(envvar="MARL_RAY_DATABASE", help="SQLAlchemy URL of the experiment store.")]
ExperimentName = Annotated[str, typer.Argument(metavar="NAME", help="The experiment.")]


@contextmanager
def named_as_options() -> Iterator[None]:
    """Name the field of a FieldError as the option of the command line that gave it, without the unit of seconds.

    Raises MarlRayError in its place. What follows the first dot of a field is a key in the option's value, which keeps its
    spelling: the key `max_steps` in `env` is `--env max_steps`.
    """
    try:
        yield
    except FieldError as error:
        name, dot, key = error.field.partition(".")
        option = name.removesuffix("_s").replace("_", "-")
        raise MarlRayError(f"--{option}{' ' if dot else ''}{key}: {error.message}") from error
