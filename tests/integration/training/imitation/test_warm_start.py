"""A run that begins with logged decisions begins where they left off."""

from pathlib import Path

import numpy as np
import pytest
import torch
from processes.two_workers import two_workers
from safetensors.torch import load_file
from toy_serving.logged_acts import LENGTH, log_countdown, of_two_warm, warm

from marl_ray.config import RunConfig, parse_config
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.training.imitation.warm_start import best_units, joint_states, read_logged_units
from marl_ray.training.run_checks import check_run
from marl_ray.training.single_process import train_alone
from marl_ray.training.team.assembly import team_agents

pytestmark = pytest.mark.usefixtures("alone")

GOOD = 0.95


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return log_countdown(tmp_path_factory.mktemp("log") / "part.parquet", GOOD, 300)


def split(rows):
    """Epochs of the warm start, iterations of the run."""
    return [row for row in rows if "iteration" not in row], [row for row in rows if row.get("iteration")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the bundle of the checkpoint that the run started from."""
    (path,) = folder.glob("0/bundle/*.safetensors")
    return load_file(path)


@pytest.mark.parametrize(
    "algorithm",
    ["mappo", "reinforce_pp", "cpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("ippo", "direct_dapo"))],
)
def test_the_first_iteration_plays_as_well_as_the_log(data, algorithm):
    """With a central, a local and no critic, one that is fitted before the actor, and a trust region."""
    more = ["constraints=[{budget: 100}]"] if algorithm == "cpo" else []
    more += ["train.group_size=2", "hyper.highest_return=6"] if algorithm == "direct_dapo" else []
    epochs, iterations = split(train_alone(warm(data, f"algorithm={algorithm}", *more)))
    assert len(epochs) == 8 and epochs[0]["steps"] == 0
    entropy = GOOD * np.log(GOOD) + (1 - GOOD) * np.log(1 - GOOD)
    assert epochs[-1]["warm_start/log_likelihood"] == pytest.approx(entropy, abs=0.02)
    assert iterations[0]["return"] == pytest.approx(GOOD * LENGTH, abs=0.2)
    fitted = algorithm in ("mappo", "ippo", "cpo")
    assert ("warm_start/value_loss" in epochs[0]) == fitted
    if fitted:
        assert epochs[-1]["warm_start/value_loss"] < epochs[0]["warm_start/value_loss"]


def test_imitating_the_best_units_of_a_poor_log_starts_better_than_the_log(tmp_path):
    poor = log_countdown(tmp_path / "part.parquet", 0.5, 600)
    cold, best = (split(train_alone(warm(poor, f"warm_start.top={top}")))[1][0]["return"] for top in (1.0, 0.1))
    assert cold == pytest.approx(0.5 * LENGTH, abs=0.3)
    assert best > cold + 0.6


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [[], ["algorithm=ippo", "warm_start.top=0.3", "warm_start.batch=61"]],
)
def test_two_workers_start_as_one(data, tmp_path, overrides):
    """Also where the last minibatch is one decision, of which one worker has no part."""
    more = [*overrides, "warm_start.epochs=2", "train.total_steps=1"]
    double = two_workers(of_two_warm, str(tmp_path / "two"), data, more)
    single = train_alone(warm(data, *more), tmp_path / "one")
    for a, b in zip(split(single)[0], split(double)[0], strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    for key, value in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "two")[key], value, atol=1e-4, rtol=1e-3)


def test_a_resumed_run_does_not_start_again(data, tmp_path):
    longer = ["train.total_steps=1536", "checkpoint.every=2"]
    uninterrupted = train_alone(warm(data, *longer), tmp_path / "whole")
    resumed = train_alone(warm(data, *longer), None, tmp_path / "whole" / "2")
    epochs, iterations = split(resumed)
    assert not epochs and [row["iteration"] for row in iterations] == [3, 4]
    assert split(uninterrupted)[1][-1]["policy_loss"] == iterations[-1]["policy_loss"]


def test_a_share_of_the_units_is_the_best_of_them():
    assert best_units(np.array([1.0, 3.0, 2.0, 3.0]), 0.5).tolist() == [False, True, False, True]
    assert best_units(np.zeros(30), 0.1).tolist() == [True] * 3 + [False] * 27
    assert best_units(np.array([1.0, 2.0]), 1e-9).tolist() == [False, True]


def test_what_a_central_critic_sees_is_what_all_agents_saw_at_a_moment(data):
    config = warm(data)
    env = make_env(config.env)
    agents = team_agents(config, env)
    logged = read_logged_units(config, env, agents)
    states, known = joint_states(logged, env, agents)
    assert known.all() and states.shape == (300, LENGTH, 4)
    seen = logged.policies["shared"].observations.unflatten(0, (300, 2))
    assert torch.equal(states, torch.cat([seen[:, 0], seen[:, 1]], -1))


def test_a_log_that_does_not_fit_is_refused_before_a_run_begins(data, tmp_path):
    storage = f"storage={tmp_path}"
    check_run(warm(data, storage))
    with pytest.raises(MarlRayError, match=r"nowhere: expected a Parquet file or a folder"):
        check_run(warm(f"{tmp_path}/nowhere", storage))
    with pytest.raises(MarlRayError, match=r"part.parquet: row 0, column agent: expected one of a, b"):
        check_run(warm(data, storage, "env.kwargs={}"))
    with pytest.raises(MarlRayError, match=r"warm_start: kl_coef=0.1 of policy 'shared'"):
        warm(data, "hyper.kl_coef=0.1")
    with pytest.raises(MarlRayError, match=r"warm_start.top"):
        parse_config(RunConfig, {"name": "n", "env": {"id": "x"}, "warm_start": {"data": "d", "top": 0}})


def test_a_policy_without_logged_decisions_is_named(data, tmp_path):
    third = "env={id: 'toys.envs:countdown', kwargs: {agents: [x, y, z]}}"
    team = "team={one: {agents: [x, y]}, other: {agents: [z]}}"
    with pytest.raises(MarlRayError, match=r"warm_start.data: .* has no decision of policy 'other'"):
        check_run(warm(data, f"storage={tmp_path}", third, team))
