"""`marl-ray try`: a first look at the product."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from marl_ray.cli.documents.output import Json, only_result, show


def try_it(
    folder: Annotated[Path, typer.Option(help="Where the run, its bundle and the databases are written.")] = Path(
        "runs/try"
    ),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the gateway's page in a browser.")] = True,
    leave: Annotated[bool, typer.Option("--exit", help="Exit after the check instead of serving on.")] = False,
    as_json: Json = False,
) -> None:
    """Train, score and serve a small team, and open its page.

    This first look takes less than a minute on two cores. The scores are of whole episodes.
    """
    from marl_ray.first_steps.quickstart import open_in_browser, quickstart, result_lines
    from marl_ray.first_steps.steps import serve_until_interrupted

    with contextlib.ExitStack() as serving:
        with only_result(as_json):
            result = serving.enter_context(quickstart(folder))
        show(as_json, result, result_lines(result))
        with only_result(as_json):
            if open_page and not leave:
                open_in_browser(f"{result.url}/ui")
            if not leave:
                serve_until_interrupted()
            serving.close()
