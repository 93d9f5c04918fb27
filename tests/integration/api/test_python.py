"""The Python API: a run, its result and its team, in the Ray of this process."""

import json
from pathlib import Path

import pytest
from toy_runs.runs import config

import marl_ray
from marl_ray.cluster.local_ray import LocalRay

pytestmark = pytest.mark.shared_ray("one")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return config(f"storage={tmp_path_factory.mktemp('runs')}", "tracking.progress=false").resolve()


@pytest.fixture(scope="module")
def run(ray_cluster: LocalRay, source: dict) -> marl_ray.TrainedRun:
    return marl_ray.train(source, evaluation={"every": 2, "episodes": 2})


def test_a_run_has_its_curve_its_metrics_and_its_team(run):
    assert run.score is not None and run.model == f"models:/{run.name}/1" and run.name in str(run)
    steps = [step for step, _ in run.curve]
    assert steps == sorted(set(steps)) and steps[0] == 0 and run.curve[-1][1] == run.metrics[-1]["eval/return"]
    rows = [json.loads(line) for line in Path(run.config.storage, run.name, "metrics.jsonl").read_text().splitlines()]
    assert run.metrics == rows
    assert run.picture and run._repr_png_().startswith(b"\x89PNG")
    team = run.load()
    spaces = {agent: team.bundle.policies[policy].observation_space for agent, policy in team.agents.items()}
    actions = team.act({agent: space.sample() for agent, space in spaces.items()}, seed=0)
    assert actions.keys() == team.agents.keys()


def test_the_same_call_returns_the_finished_run(run, source):
    again = marl_ray.train(source, evaluation={"every": 2, "episodes": 2})
    assert not again.result.trained and again.model == run.model and again.metrics == run.metrics


def test_a_mistake_is_one_line_before_anything_starts(source):
    with pytest.raises(marl_ray.MarlRayError, match=r"^config: hyper: .*lrr|^config: unknown key .*lrr"):
        marl_ray.train(source, hyper={"lrr": 1})
