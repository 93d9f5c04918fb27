"""The learner and the loop: the same update however the batch is divided, and bit-for-bit resume. No Ray."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from toy_runs.runs import BRIEF, PLAYING, TWO_POLICIES, config, short, timeless, weights

from marl_ray.config import SPECS
from marl_ray.training.errors import DivergedError
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.single_process import train_alone
from marl_ray.tuning.search.metric_names import metric_names


@pytest.mark.parametrize("algorithm", PLAYING)
def test_a_resumed_run_equals_one_that_never_stopped(alone, tmp_path, algorithm):
    """Multipliers, controllers, normalisers, coefficients and random numbers included."""
    steered = {"kl_coef": 0.1, "kl_target": 0.01, "entropy_target": 0.5}
    more = [f"hyper.{key}={value}" for key, value in steered.items() if key in SPECS[algorithm].read_keys]
    uninterrupted = train_alone(short(algorithm, *more), tmp_path / "whole")
    resumed = train_alone(short(algorithm, *more), tmp_path / "again", tmp_path / "whole" / "2")
    assert len(uninterrupted) > 2
    assert set().union(*uninterrupted) == {*metric_names(short(algorithm, *more))} - {"score"}  # which sweeps add
    assert timeless([row for row in uninterrupted if row["iteration"] > 2]) == timeless(resumed)
    last = str(uninterrupted[-1]["iteration"])
    states = [json.loads((tmp_path / name / last / "state.json").read_text()) for name in ("whole", "again")]
    for state in states:
        state["metrics"] = timeless([state["metrics"]])
        assert state.pop("seconds") > 0
    assert states[0] == states[1]


@pytest.mark.parametrize("algorithm", PLAYING)
def test_micro_batches_change_nothing(alone, tmp_path, algorithm):
    """Nor where two policies are updated one after another."""
    team = [TWO_POLICIES] if SPECS[algorithm].order == "sequential" else []
    undivided = train_alone(short(algorithm, BRIEF, *team))
    parts = train_alone(short(algorithm, BRIEF, *team, f"train.micro_batch={3 if team else 1}"))
    for a, b in zip(timeless(undivided), timeless(parts), strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_the_toy_is_learned(alone, tmp_path):
    rows = train_alone(config("train.total_steps=4096", "train.env_copies=16", "hyper.entropy_coef=0"), tmp_path)
    # Agent a plays 6 steps and b 3: always right is 4.5 a head, a coin toss half of it.
    assert rows[-1]["return"] > 4.0


def test_policies_train_with_algorithms_of_their_own_and_frozen_ones_do_not_move(alone, tmp_path):
    train_alone(config("train.total_steps=32"), tmp_path / "first")
    bundle = next((tmp_path / "first").glob("*/bundle"))
    team = {
        "mover": {"agents": ["a"], "algorithm": "ippo", "hyper": {"lr": 0.02}},
        "rock": {"agents": ["b"], "bundle": str(bundle), "frozen": True},
    }
    rows = train_alone(config(f"team={json.dumps(team)}", "train.total_steps=64"), tmp_path / "second")
    assert "policy_loss" in rows[-1]
    (rock,) = (tmp_path / "second").glob("2/bundle/rock.safetensors")
    for key, value in weights(bundle.parent).items():
        assert torch.equal(load_file(rock)[key], value)


def test_clipping_is_by_each_networks_own_norm(alone):
    from marl_ray.training.learner.optimizers import clip_gradients

    big, small = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    big.weight.grad, small.weight.grad = torch.full((2, 2), 10.0), torch.full((2, 2), 0.1)
    norms = clip_gradients((big, small), 1.0)
    assert norms.tolist() == pytest.approx([20.0, 0.2])
    assert big.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)
    assert small.weight.grad.norm().item() == pytest.approx(0.2)


def test_a_trust_region_shrinks_with_the_rest_of_the_run(alone):
    """A step as long as ever would follow the noise of the batch once little is left to gain."""
    made = short("cpo", "hyper.lr_decay=true", "hyper.trust_region=0.02", "train.rollout=episodes")
    run = build_run(made, torch.device("cpu"))
    before = run.step()["trust_region_kl"]
    run.state.steps = made.train.total_steps * 3 // 4
    assert 0 < run.step()["trust_region_kl"] <= 0.005 < before
    run.close()


def test_a_number_that_is_not_finite_stops_the_run_and_is_named(alone, tmp_path):
    poison = ["env={id: 'toys.envs:poisoned', kwargs: {after: 7}}", "train.total_steps=100000", "evaluation.every=0"]
    with pytest.raises(
        DivergedError,
        match=r"policy 'shared', iteration \d+, step \d+: rewards of the batch are not finite: the reward of a is nan "
        r"at step 1 of the episode of reset\(seed=\d+\)$",
    ):
        train_alone(config(*poison), tmp_path)
    checkpoints = sorted(int(path.name) for path in tmp_path.iterdir())
    assert checkpoints and (tmp_path / str(checkpoints[-1]) / "state.json").exists()


@pytest.mark.parametrize("rollout", ["steps", "episodes"])
@pytest.mark.parametrize("arrays", [False, True])
def test_the_place_of_a_number_that_is_not_finite_is_where_it_is_met_again(alone, arrays, rollout):
    made = config(
        f"env={{id: 'toys.envs:faulty', kwargs: {{arrays: {arrays}}}}}",
        f"train.rollout={rollout}",
        "train.total_steps=100000",
        "evaluation.every=0",
    )
    with pytest.raises(DivergedError) as caught:
        train_alone(made)
    place = re.search(
        r"are not finite: the reward of b is nan at step 2 of the episode of reset\(seed=(\d+)\)$", str(caught.value)
    )
    assert place and int(place[1]) % 7 == 0


def test_losses_that_are_not_finite_stop_the_run(alone, tmp_path):
    with pytest.raises(DivergedError, match=r"policy 'shared', iteration \d+, step \d+: .* not finite"):
        train_alone(config("hyper.lr=1e30", "hyper.epochs=8", "hyper.max_grad_norm=1e30"), tmp_path)
