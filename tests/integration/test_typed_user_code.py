"""A user's own files and script pass `mypy --strict`: those of every template, and one that uses the whole Python API."""

import subprocess
import sys

import pytest
from processes.command_line import marl_ray

from marl_ray.extensions import POINTS

SCRIPT = """
import marl_ray
from marl_ray.config import EnvConfig
from marl_ray.envs.registry import make_env


def main() -> tuple[list[tuple[int, float]], dict[str, str]]:
    run = marl_ray.train("run.yaml", hyper={"lr": 3e-4}, name="typed")
    score: float | None = run.score
    team = marl_ray.load(run.bundle)
    env = make_env(EnvConfig(id="MultiGrid-Empty-8x8-v0"))
    observations, _ = env.reset(seed=0)
    env.step(team.act(observations, greedy=True))
    sweep = marl_ray.sweep("sweep.yaml", seeds=1)
    scores = marl_ray.evaluate(policy=run.bundle, episodes=2)
    compared = marl_ray.compare([run])
    compared.plot("comparison.png")
    with marl_ray.Client("http://127.0.0.1:8000") as client:
        acted = client.act(observations)
        client.record_outcome(acted.session, 1.0)
    print(score, sweep.report, scores.interval, acted.arm)
    return run.curve, team.agents


if __name__ == "__main__":
    try:
        main()
    except marl_ray.MarlRayError as error:
        print(error)
"""
STRICT = ("--strict", "--ignore-missing-imports")
"""PettingZoo has no types."""


@pytest.mark.slow
@pytest.mark.timeout(960)  # mypy begins without a cache
def test_every_template_and_the_python_api_are_typed(tmp_path):
    for kind in POINTS:
        assert marl_ray("new", kind, f"my_{kind}", folder=tmp_path).returncode == 0
    (tmp_path / "script.py").write_text(SCRIPT)
    files = sorted(path.name for path in tmp_path.glob("*.py"))
    assert len(files) == 2 * len(POINTS) + 1
    command = [sys.executable, "-m", "mypy", *STRICT, "--cache-dir", ".cache", *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout
