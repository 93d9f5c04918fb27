"""Command-line options that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from marl_ray.errors import FieldError, MarlRayError

LOCAL_DASHBOARD = "http://127.0.0.1:8265"
Address = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="URL of the cluster's dashboard.")]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; its current one where not given.")]
Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="The context's where not given.")]
KubeRay = Annotated[
    Path | None,
    typer.Option("--kuberay", metavar="CLUSTER", help="Config of a cluster: run as a RayJob on one of its own."),
]
SubmissionId = Annotated[str | None, typer.Option(help="Name of the job; submitting it twice joins the first.")]


@contextmanager
def named_as_options() -> Iterator[None]:
    """Name the field of a FieldError as the option of the command line that gave it."""
    try:
        yield
    except FieldError as error:
        raise MarlRayError(f"--{error.field.replace('_', '-')}: {error.message}") from error
