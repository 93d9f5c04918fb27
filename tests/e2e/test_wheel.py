"""The wheel: every file of the package is in it, and its commands run where nothing else of the repository is."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from processes.environment import without_ray

from marl_ray.extensions import POINTS
from marl_ray.first_steps.demo import ARM_CONFIGS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
"""Longest wait for a command; each takes a few seconds, but for a job, which compiles a gridworld in a minute."""
MIGRATE = """
import sqlalchemy as sa
from marl_ray.experiments.database.migrations import upgrade
engine = sa.create_engine("sqlite:///experiments.db")
upgrade(engine)
print(sa.inspect(engine).get_table_names())
"""
SUBMIT = """
import sys
from marl_ray.cli import main
from marl_ray.cluster.local_ray import local_ray
from marl_ray.first_steps.demo import ARM_CONFIGS
with local_ray(num_cpus=4) as ray:
    main(["submit", "train", str(ARM_CONFIGS["mappo"]), "--address", ray.dashboard_url, *sys.argv[1:]])
"""


def run(command: list[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder` without the variables that lead Python or pip to this checkout."""
    env = {key: value for key, value in without_ray().items() if not key.startswith(("PYTHON", "PIP_"))}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


def run_successfully(command: list[str | Path], folder: Path) -> str:
    """Standard output of a program that must succeed."""
    done = run(command, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network from a copy of what it is made of: building leaves files beside the sources."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", symlinks=True, ignore=ignored)
    build = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist", "."]
    run_successfully([sys.executable, "-m", "pip", *build], copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a fresh environment that holds the wheel.

    It borrows this environment's dependencies. A `.pth` file adds a folder behind the fresh environment's own. The
    `.pth` file of this checkout in that folder is not read, so `marl_ray` is the wheel's.
    """
    fresh = tmp_path_factory.mktemp("fresh")
    venv.create(fresh, symlinks=True)
    (packages,) = fresh.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install: list[str | Path] = ["--quiet", "--no-deps", "--no-index", "--ignore-installed", wheel]
    run_successfully([sys.executable, "-m", "pip", "--python", fresh / "bin" / "python", "install", *install], fresh)
    return fresh / "bin"


def test_the_wheel_holds_every_file_of_the_package_and_the_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = archive.read(next(name for name in held if name.endswith(".dist-info/METADATA"))).decode()
        configs = {
            path.name: archive.read(f"marl_ray/first_steps/configs/{path.name}") for path in ARM_CONFIGS.values()
        }
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "marl_ray").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources == {name for name in held if name.startswith("marl_ray/")}
    assert {"marl_ray/cluster/lint/kuberay-v1.7.0.json", "marl_ray/style.css"} < sources
    assert {f"marl_ray/templates/{kind}/NAME.py.j2" for kind in POINTS} < sources
    assert configs == {name: (ROOT / "jobs/configs" / name).read_bytes() for name in configs}
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.slow
def test_its_commands_run_in_a_fresh_environment(installed, tmp_path):
    where = "import marl_ray; print(marl_ray.__file__)"
    assert run_successfully([installed / "python", "-c", where], tmp_path).startswith(str(installed.parent))
    program = installed / "marl-ray"
    assert "Usage: marl-ray" in run_successfully([program, "--help"], tmp_path)
    assert "Train two teams" in run_successfully([program, "demo", "--help"], tmp_path)
    assert "mappo" in run_successfully([program, "algorithms"], tmp_path)
    schema = json.loads(run_successfully([program, "config", "schema", "gateway"], tmp_path))
    assert "experiments" in schema["properties"]
    files = [ROOT / "serve/configs/gridworld_ab.yaml", ROOT / "cluster/kuberay/rayservice.yaml"]
    assert "no findings" in run_successfully([program, "lint", *files], tmp_path)
    config = ROOT / "jobs/configs/multigrid_mappo.yaml"
    assert "gridworld-mappo" in run_successfully([program, "train", config, "--dry-run"], tmp_path)


@pytest.mark.slow
def test_files_that_are_read_at_run_time_are_where_they_are_looked_for(installed, tmp_path):
    """Migrations, the pages of the gateway and of reports, and the programs that go into the sandbox."""
    assert "'exposures'" in run_successfully([installed / "python", "-c", MIGRATE], tmp_path)
    read = [
        "from marl_ray.drawing import read_stylesheet",
        "from marl_ray.serving.pages import render",
        "from marl_ray.tuning.reporting import report",
        "from marl_ray.evaluation.benchmarks import bigcodebench, evalplus",
        "assert all((folder / name).is_file() for folder, name in [",
        "    (render.PAGES, 'base.html'), (report.PAGES, 'report.html')]) and read_stylesheet()",
        "assert bigcodebench.driver_source() and evalplus.driver_source()",
    ]
    run_successfully([installed / "python", "-c", "\n".join(read)], tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)  # the wheel's first run compiles all that numba compiles
def test_it_submits_a_config_of_the_demo_as_a_job_as_the_demo_does(installed, tmp_path):
    short = ["train.total_steps=512", "train.env_copies=4", "evaluation.episodes=2", "resources.workers=1"]
    log = run_successfully([installed / "python", "-c", SUBMIT, f"storage={tmp_path}/runs", *short], tmp_path)
    assert "gridworld-mappo: best return" in log
    assert (tmp_path / "runs" / "gridworld-mappo" / "bundle" / "bundle.json").is_file()
