"""The program in its own process: what it loads, what a shell completes, its end; and a dry run of a sweep."""

import json
import os
import subprocess
import sys

import pytest
from processes.command_line import marl_ray

from marl_ray import __version__

RUN = "jobs/configs/multigrid_mappo.yaml"


def test_the_program_is_a_module_too_and_its_help_loads_nothing_large():
    large = ("marl_ray.config", "mlflow", "numpy", "pyarrow", "pydantic", "ray", "torch", "yaml")
    code = f"import sys, marl_ray.cli; print([name for name in {large} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert loaded.stdout == "[]\n", loaded.stderr
    module = [sys.executable, "-m", "marl_ray", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, timeout=60).stdout == f"marl-ray {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("marl-ray tra", ["train"]),
        ("marl-ray algorithms mapp", ["mappo", "mappo_lagrangian"]),
        (f"marl-ray train {RUN} train.total", ["train.total_steps="]),
        (f"marl-ray train {RUN} algorithm=dr", ["algorithm=dr_grpo"]),
    ],
)
def test_a_shell_completes_names(words, expected):
    number = str(len(words.split()) - 1)
    variables = {"_MARL_RAY_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    program = [sys.executable, "-m", "marl_ray"]
    done = subprocess.run(program, env=os.environ | variables, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == expected, done.stderr


def test_what_a_program_wrote_is_in_its_files_when_it_ends(tmp_path):
    """Files that nothing closes, in a cycle of objects, which Python writes when it searches for garbage at its end."""
    code = f"""
from marl_ray.cli import main

class Logged:
    def __init__(self, path, mode, line):
        self.own, self.file = self, open(path, mode)
        self.file.write(line)

kept = Logged({str(tmp_path / "text")!r}, "w", "a line"), Logged({str(tmp_path / "bytes")!r}, "wb", b"a line")
main(["--version"])
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert [(tmp_path / name).read_text() for name in ("text", "bytes")] == ["a line"] * 2


def test_a_dry_run_of_a_sweep_is_a_document():
    planned = marl_ray("sweep", "jobs/configs/sweeps/gridworld.yaml", "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["seeds"]
