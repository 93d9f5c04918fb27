"""The command `marl-ray try`."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("try")(try_it)


def try_it(
    folder: Annotated[Path, typer.Option(help="Where the run, its bundle and the databases are written.")] = Path(
        "runs/try"
    ),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the gateway's page in a browser.")] = True,
    leave: Annotated[bool, typer.Option("--exit", help="End after the check, and serve no longer.")] = False,
) -> None:
    """A first look, in less than a minute: train a small team, score it on whole episodes, serve it, open its page."""
    from marl_ray.trying import run_trial

    run_trial(folder, open_page and not leave, leave)
