"""The image file names what exists, and what is pinned. Whether it builds is seen where images can be built."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
LINES = (
    re.sub(
        r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "cluster/docker/Dockerfile").read_text(), flags=re.MULTILINE)
    ).strip()
).splitlines()


def words(instruction: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in LINES if line.startswith(f"{instruction} ")]


def test_everything_that_is_copied_exists_and_is_sent_to_the_builder():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {
        source
        for copied in words("COPY")
        if not any(word.startswith("--from") for word in copied)
        for source in [word for word in copied if not word.startswith("--")][:-1]
    }
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)


def test_the_torch_that_is_installed_first_is_the_pinned_one():
    """The shell command in the file is run on constraints.txt."""
    [command] = re.findall(r'TORCH="\$\((.*?)\)"', "\n".join(LINES))
    installed = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    requirement = Requirement(installed.stdout.strip())
    assert requirement.name == "torch" and [part.operator for part in requirement.specifier] == ["=="]


def test_the_extras_that_are_installed_are_the_projects_and_all_else_is_pinned():
    [project] = [line for line in LINES if '".[' in line]
    options = shlex.split(project)
    requirement = Requirement(f"marl-ray{options[-1].removeprefix('.')}")
    assert (
        requirement.extras
        and requirement.extras
        <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )
    assert options[options.index("--constraint") + 1] == "constraints.txt"


def test_the_image_is_of_the_user_and_has_the_files_that_manifests_name(tmp_path):
    """The shell command that puts the configs into the image is run on the checkout's."""
    assert words("USER") == [["1000"]]
    [number] = [number for number, line in enumerate(LINES) if line.startswith("RUN cp ")]
    assert {"COPY src ./src", "COPY jobs ./jobs"} < set(LINES[:number])
    command = LINES[number].removeprefix("RUN ").replace("/opt/marl-ray", str(tmp_path))
    subprocess.run(["sh", "-c", command], cwd=ROOT, check=True, timeout=60)
    values = yaml.safe_load((ROOT / "helm/marl-ray/ci/external-values.yaml").read_text())
    path = Path(values["jobs"]["gridworld"]["configFile"])
    assert (tmp_path / path.relative_to("/opt/marl-ray")).is_file()
    assert not any(path.is_symlink() for path in tmp_path.rglob("*"))


def test_the_package_is_whole_without_the_rest_of_the_checkout():
    assert [path for path in (ROOT / "src").rglob("*") if path.is_symlink()] == []
