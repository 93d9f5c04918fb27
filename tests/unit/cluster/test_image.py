"""The image file names what exists, and what is pinned. Whether it builds is seen where images can be built."""

import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
LINES = (
    re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "cluster/docker/Dockerfile").read_text(), flags=re.M)).strip()
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


def test_every_version_is_pinned_and_torch_is_for_cpus_unless_asked():
    [torch] = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    installs = [line for line in LINES if "pip install" in line]
    assert torch and len(installs) == 2
    assert all("constraints.txt" in line for line in installs)
    assert [arg for arg in words("ARG") if arg[0].startswith("TORCH_INDEX=")] == [
        ["TORCH_INDEX=https://download.pytorch.org/whl/cpu"]
    ]
    extras = re.search(r'"\.\[(.*)\]"', installs[1])
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras[1].split(","))


def test_the_image_is_of_the_user_and_the_paths_that_manifests_name():
    assert words("USER") == [["1000"]]
    values = yaml.safe_load((ROOT / "helm/marl-ray/ci/external-values.yaml").read_text())
    path = Path(values["jobs"]["gridworld"]["configFile"])
    copied = {copy[-1]: copy[-2] for copy in words("COPY")}
    assert (ROOT / copied["/opt/marl-ray/jobs"] / path.relative_to("/opt/marl-ray/jobs")).is_file()
