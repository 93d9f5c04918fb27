"""The reference of all commands, which `python -m marl_ray.cli.documents.reference` prints for docs/command_line.md."""

from collections.abc import Iterator
from typing import Any

import typer

from marl_ray.cli.documents.forms import FORMS
from marl_ray.cli.main import COMMANDS, app

INTRODUCTION = """\
# Commands

`python -m marl_ray.cli.documents.reference` writes this page from the commands themselves; a test compares the two.
`marl-ray` and `python -m marl_ray` are the same program. `marl-ray COMMAND --help` shows one command, and
`marl-ray --install-completion` makes the shell complete commands, options, files,
names of runs and algorithms, and keys of configs.

A mistake of the user is one line on stderr and exit status 2; Ctrl-C is status 130. With `--json` a command prints one JSON
document on stdout, and all else on stderr. Numbers that are not finite are null in it, times are seconds since 1970.
"""


def command_page() -> str:
    """Return the page, in Markdown."""
    root: Any = typer.main.get_command(app)
    lines = [INTRODUCTION]
    for group, commands in COMMANDS.items():
        lines += [f"## {group}", ""]
        for name in commands:
            lines += _section(name, root.commands[name])
    return "\n".join(lines).rstrip() + "\n"


def _section(path: str, command: Any) -> Iterator[str]:
    """Yield one command, or the commands of a group one after another."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from _section(f"{path} {name}", inner)
        return
    yield from (f"### {path}", "", *_paragraphs(command.help or ""), "")
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    yield from ("```text", f"marl-ray {' '.join([path, *map(_usage, arguments), '[OPTIONS]'])}", "```", "")
    rows = [(f"`{_usage(argument)}`", argument) for argument in arguments]
    rows += [(_options(option), option) for option in command.params if option.param_type_name == "option"]
    yield from ("| argument or option | default | meaning |", "|---|---|---|")
    for name, parameter in rows:
        yield f"| {name} | {_default(parameter)} | {_cell(parameter.help or '')} |"
    yield ""
    if path in FORMS:
        yield from ("With `--json`:", "", "| key | meaning |", "|---|---|")
        for keys, meaning in FORMS[path].items():
            yield f"| {', '.join(f'`{key.strip()}`' for key in keys.split(','))} | {_cell(meaning)} |"
        yield ""


def _paragraphs(text: str) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in text.strip().split("\n\n")]
    return "\n\n".join(paragraphs).split("\n")


def _usage(argument: Any) -> str:
    name = str(argument.metavar or argument.name.upper())
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _options(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    shown = "" if value is None or value is False or value == () else f"`{value}`"
    return f"{shown} or `${parameter.envvar}`".removeprefix(" or ") if parameter.envvar else shown


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(command_page(), end="")
