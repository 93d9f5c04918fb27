"""Command-line options that several commands share."""

from typing import Annotated

import typer

LOCAL_DASHBOARD = "http://127.0.0.1:8265"
Address = Annotated[str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="URL of the cluster's dashboard.")]
SubmissionId = Annotated[str | None, typer.Option(help="Name of the job; submitting it twice joins the first.")]
