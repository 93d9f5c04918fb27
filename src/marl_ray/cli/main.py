"""The program: its table of commands, and the exit statuses of errors."""

import atexit
import contextlib
import gc
import io
import os
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
import typer.core

from marl_ray.cli.cluster import cluster_app
from marl_ray.cli.evaluation import aggregate, evaluate, tasks
from marl_ray.cli.extensions import check_app, new
from marl_ray.cli.inspection import algorithms, config_app
from marl_ray.cli.serving.experiments import experiment_app
from marl_ray.cli.serving.gateways import deploy, export, lint, serve
from marl_ray.cli.training.plan import plan_memory
from marl_ray.cli.training.quickstart import try_it
from marl_ray.cli.training.runs import runs_app
from marl_ray.cli.training.submit import submit_app
from marl_ray.cli.training.sweep import report, sweep
from marl_ray.cli.training.train import demo, train
from marl_ray.cluster.waits import INTERRUPTED_STATUS
from marl_ray.errors import MarlRayError

UsageError: Any = typer.BadParameter.__base__
"""Typer's error of a wrong word of the command line, which it does not export."""
BUFFERED_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""The types of files that keep what is written to them for a while."""
COMMANDS: dict[str, dict[str, Callable[..., object] | typer.Typer]] = {
    "Train": {
        "train": train,
        "plan": plan_memory,
        "try": try_it,
        "runs": runs_app,
        "sweep": sweep,
        "report": report,
        "demo": demo,
    },
    "Measure": {"evaluate": evaluate, "aggregate": aggregate, "tasks": tasks},
    "Serve": {"serve": serve, "deploy": deploy, "experiment": experiment_app, "export": export},
    "Cluster": {"submit": submit_app, "cluster": cluster_app, "lint": lint},
    "Extend": {"new": new, "check": check_app},
    "Inspect": {"algorithms": algorithms, "config": config_app},
}
"""Group of the help -> name -> command, in the order of the help."""


class _Commands(typer.core.TyperGroup):
    """The commands in the order of the table. Typer's own answer to Ctrl-C is status 1."""

    def list_commands(self, ctx: object) -> list[str]:
        return [name for group in COMMANDS.values() for name in group]

    def invoke(self, ctx: Any) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("marl-ray: interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED_STATUS) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(prints: bool) -> None:
    if prints:
        from marl_ray import __version__

        print(f"marl-ray {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train teams of policies on Ray, measure them, serve the winners."""


for _group, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_group)
        else:
            app.command(_name, rich_help_panel=_group)(_command)


def _usage_line_parts(error: Any, words: Sequence[str]) -> Iterator[str]:
    """Yield the parts of one line about a wrong word of the command line.

    It yields nothing where the help of a group was shown instead.
    """
    if message := _value_message(error):
        error.message = message
    text = error.format_message().replace("Value error, ", "").rstrip(".")
    if not text:
        return
    command = error.ctx.command_path if error.ctx else "marl-ray"
    yield f"{command}: {text}"
    option = getattr(error, "option_name", "").partition("=")[0]
    if option and error.ctx and any(argument.name == "overrides" for argument in error.ctx.command.params):
        override = _override_after(option, words)
        meant = f"{option.lstrip('-')}=VALUE" if override is None else f"{override}, without {option}"
        yield f"; a key of the config has no dashes: {meant}"
    yield f"; {command} --help tells more\n"


def _value_message(error: Any) -> str:
    """Return what was expected instead of a value, as errors of a config say it; "" for all other errors."""
    from pydantic import ValidationError

    from marl_ray.config.mistakes.wording import message_of

    if not isinstance(error.__cause__, ValidationError):
        return ""
    first = error.__cause__.errors()[0]
    return "" if first["type"] == "value_error" else f"{message_of(first)}, got {first['input']!r}"


def _override_after(option: str, words: Sequence[str]) -> str | None:
    """Return the KEY=VALUE that follows this option, as in `--set KEY=VALUE`; None if there is none."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == option or word.startswith(f"{option}="):
            value = following if word == option else word.removeprefix(f"{option}=")
            return value if "=" in value and not value.startswith("-") else None
    return None


def _leave_garbage() -> None:
    """Let Python end without a search for garbage, and write files that are still open.

    The search would write them too: a user's environment may keep a log in one.
    """
    for candidate in gc.get_objects():
        if type(candidate) in BUFFERED_FILES:
            with contextlib.suppress(OSError, ValueError):  # it is closed, or has no file
                if stat.S_ISREG(os.fstat(candidate.fileno()).st_mode):  # a pipe could block
                    candidate.flush()
    gc.freeze()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; always raises SystemExit.

    A MarlRayError, and a wrong word of the command line, is one line on stderr and status 2; Ctrl-C is status 130.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python` does, so that an `env.id` may name a module that lies here
    # Modules leave no garbage, so Python looks for it less often while it imports them, and not again as the process ends:
    # with torch, Ray and MLflow loaded these searches take four seconds.
    gc.set_threshold(10_000)
    atexit.register(_leave_garbage)
    # pygame's own, at every import of a gridworld or of mpe2
    warnings.filterwarnings("ignore", "pkg_resources is deprecated", UserWarning)
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        status = app(args=words, prog_name="marl-ray", standalone_mode=False)
        raise SystemExit(status or 0)
    except MarlRayError as error:
        print(f"marl-ray: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(1) from None
    except UsageError as error:
        print(*_usage_line_parts(error, words), sep="", end="", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED_STATUS) from None
