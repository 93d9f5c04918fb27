"""The command line inside the tests' own process, where Python and its libraries are loaded already."""

import contextlib
import functools
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

from marl_ray.cli import main
from marl_ray.cli.documents.forms import FORMS
from processes.environment import without_ray

ROOT = Path(__file__).parents[3]
PROGRAM = str(Path(sys.executable).parent / "marl-ray")
BUILD_COMMANDS = functools.cache(typer.main.get_command)
"""Typer builds all commands for each call, in 60 ms."""


def marl_ray(*arguments: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Call `marl-ray ARGUMENTS` in this process, and return what it printed and its exit status.

    Its folder is the repository's root by default.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, without_ray(), clear=True),
        patch.object(sys, "path", [*sys.path]),
        patch.object(typer.main, "get_command", BUILD_COMMANDS),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main([str(argument) for argument in arguments])
    code = ended.value.code
    status = code if isinstance(code, int) else int(code is not None)
    return subprocess.CompletedProcess(["marl-ray", *map(str, arguments)], status, out.getvalue(), err.getvalue())


def keys_of(command: str) -> set[str]:
    """The keys at the top of a command's document, or of each entry of its list."""
    return {part.strip().removeprefix("[].") for keys in FORMS[command] for part in keys.split(",")} - {"..."}
