"""`marl-ray try`."""

from pathlib import Path
from typing import Annotated

import typer


def try_it(
    folder: Annotated[Path, typer.Option(help="Where the run, its bundle and the databases are written.")] = Path(
        "runs/try"
    ),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the gateway's page in a browser.")] = True,
    leave: Annotated[bool, typer.Option("--exit", help="End after the check, and serve no longer.")] = False,
) -> None:
    """Train, score and serve a small team, and open its page.

    This first look takes less than a minute on two cores. The scores are of whole episodes.
    """
    from marl_ray.first_steps.short_try import run_short_try

    run_short_try(folder, open_page and not leave, leave)
