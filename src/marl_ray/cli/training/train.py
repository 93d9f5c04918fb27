"""`marl-ray train` and `marl-ray demo`: one run, and the whole product."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from marl_ray.cli.cluster import PRINTER
from marl_ray.cli.documents.output import Json, only_result, show
from marl_ray.cli.options import DryRun, Overrides, RunFile

if TYPE_CHECKING:
    from marl_ray.config import RunConfig
    from marl_ray.training.run_result import RunResult


def train(config: RunFile, overrides: Overrides = None, dry_run: DryRun = False, as_json: Json = False) -> None:
    """Train a team; the same command continues it.

    It trains on the cluster of RAY_ADDRESS, or on its own Ray that ends with the run. For a finished run it prints
    the results and exits with status 0.
    """
    from marl_ray.api.training import check_and_train, environment_warning
    from marl_ray.runs.naming import load_named

    run, named_overrides = load_named(config, overrides or ())
    if len(named_overrides) > len(overrides or ()):
        hint = "a run gets one such as this" if dry_run else f"`marl-ray runs resume {run.name}` continues it"
        print(f"{run.name}: the config has no name; {hint}", file=sys.stderr)
    if dry_run:
        import yaml

        from marl_ray.training.run_checks import check_run

        check_run(run)
        warning = environment_warning(run)
        if warning is not None:
            print(f"{run.name}: {warning}", file=sys.stderr)
        show(as_json, run.resolve(), [yaml.safe_dump(run.resolve(), sort_keys=False).rstrip()])
        return
    with only_result(as_json):
        result = check_and_train(run)
    show(as_json, result, result_lines(result))
    warn_of(run)


def result_lines(result: "RunResult") -> Iterator[str]:
    """Yield the result of a run in lines for people."""
    if not result.trained:
        advice = "raise train.total_steps to continue it, or choose another name"
        yield f"{result.name}: is finished, and nothing was trained; {advice}"
    score = "" if result.best_return is None else f"best return {result.best_return:.3f}, "
    yield f"{result.name}: {score}{result.model or 'not registered yet'}"
    yield from (f"  {line}" for line in result.summary)
    yield f"  bundle  {result.bundle}"
    if result.curve:
        yield f"  curve   {result.curve}"
    yield f"  MLflow  run {result.run_id} in {result.tracking_uri}"


def warn_of(run: "RunConfig") -> None:
    """Warn of a collapse that the metrics of an ended run show.

    A return that did not rise yet, without any other sign, is no news after a short run; `runs show` says that too.
    """
    from marl_ray.runs.diagnosis import has_only_return_news
    from marl_ray.runs.stored import find_run
    from marl_ray.runs.summary import details_of

    sentences = details_of(find_run(run.name, run.storage)).warnings
    if not has_only_return_news(sentences):
        for sentence in sentences:
            print(f"{run.name}: warning: {sentence}", file=sys.stderr)


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the gateway serving until Ctrl-C.")] = False,
    folder: Annotated[Path, typer.Option(help="Where runs, plots and databases are written.")] = Path("runs/demo"),
    episodes: Annotated[int, typer.Option(min=1, help="Episodes played through HTTP.")] = 400,
    as_json: Json = False,
) -> None:
    """Train two teams, serve both, A/B them over HTTP."""
    from marl_ray.first_steps.demo import demonstrate, print_result
    from marl_ray.first_steps.steps import serve_until_interrupted

    with contextlib.ExitStack() as serving:
        with only_result(as_json):
            result = serving.enter_context(demonstrate(folder, episodes, PRINTER))
        if as_json:
            show(as_json, result, ())
        else:
            print_result(result, keep)
        with only_result(as_json):
            if keep:
                serve_until_interrupted()
            serving.close()
