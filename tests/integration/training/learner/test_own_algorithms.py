"""Algorithms by import path, and which hyper-parameters an algorithm reads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from toy_runs.runs import PLAYING, TWO_POLICIES, batch_of, config, short, team_of

from marl_ray.algorithms import algorithm_of
from marl_ray.config import SPECS, AlgorithmSpec, HyperParameters, RunConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.training.costs import CostStats
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.learner.trained_policy import LearnerSettings
from marl_ray.training.single_process import process_group, train_alone
from marl_ray.trajectories import Trajectories

OWN = "own_algorithms:DECOUPLED_PPO"


def play(run: RunConfig) -> tuple[Learner, Trajectories]:
    """The learner of the first policy, and a batch of it; a process group is up."""
    team = team_of(run)
    batch = batch_of(run, team)
    name = next(iter(team.learners))
    return team.learners[name], batch.trajectories[name]


def test_an_algorithm_of_ones_own_trains_with_a_key_of_its_own():
    run = config(f"algorithm={OWN}", "hyper.behaviour_cap=1.5", "train.total_steps=64")
    assert run.hyper_of("shared").behaviour_cap == 1.5  # type: ignore[attr-defined]  # of the algorithm
    assert RunConfig.model_validate(run.as_given()) == run
    assert run.resolve()["team"]["shared"]["hyper"]["behaviour_cap"] == 1.5
    rows = train_alone(run)
    assert all("explained_variance" in row for row in rows if "policy_loss" in row)
    with pytest.raises(MarlRayError, match=r"hyper.behaviour_cap: expected a number greater than 0"):
        config(f"algorithm={OWN}", "hyper.behaviour_cap=-1")
    with pytest.raises(MarlRayError, match=r"unknown key 'hyper.behaviour_cap'"):
        config("algorithm=ppo", "hyper.behaviour_cap=1.5")


def test_decoupled_ppo_tells_the_policies_apart():
    """It is PPO if nothing is stale; if another policy sampled, its loss is weighted by pi_old / pi_behaviour."""
    with process_group():
        for stale in (0.0, 0.3):
            weights = {}
            for algorithm in ("ppo", OWN):
                learner, batch = play(config(f"algorithm={algorithm}", "hyper.epochs=1", "hyper.minibatches=1"))
                sampled = replace(batch, log_probs=batch.log_probs - stale)
                learner.update(sampled, 0, 0, CostStats(None, 0))
                weights[algorithm] = torch.cat([p.flatten() for p in learner.policy.rollout_model.actor.parameters()])
            assert torch.allclose(weights["ppo"], weights[OWN], atol=1e-6) == (stale == 0.0)


def test_the_gradients_of_cost_critics_are_clipped_where_the_critic_is_fitted_first():
    needed = ("constraints=[{budget: 4}]", "train.rollout=episodes")
    tiny_steps = ("hyper.optimizer=sgd", "hyper.max_grad_norm=1e-9")
    with process_group():
        learner, batch = play(config("algorithm=own_algorithms:FITTED_LAGRANGIAN", *needed, *tiny_steps))
        weights = [p for critic in learner.policy.critics[1:] for p in critic.parameters()]
        before = [p.detach().clone() for p in weights]
        learner.update(batch, 0, 0, CostStats((4.5,), 3, 6.0))
        changes = [float((p.detach() - old).abs().max()) for p, old in zip(weights, before, strict=True)]
    assert len(weights) > 0 and max(changes) < 1e-8


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("dapoo", "'dapoo' is unknown; did you mean dapo or "),
        ("zzz", r"'zzz' is unknown; expected one of ppo, ippo, .* or package.module:NAME"),
        ("no_such_module:X", r"cannot import 'no_such_module' of 'no_such_module:X' \(ModuleNotFoundError"),
        ("own_algorithms:MISSING", r"'MISSING' of 'own_algorithms:MISSING' is not in the module"),
        ("own_algorithms:SPECS", r"own_algorithms:SPECS: expected an Algorithm"),
        ("own_algorithms:", r"expected package.module:NAME"),
    ],
)
def test_what_is_no_algorithm_is_refused_by_name(reference, message):
    with pytest.raises(MarlRayError, match=message) as caught:
        parse_config(RunConfig, {"name": "a", "env": {"id": "x"}, "algorithm": reference})
    assert "algorithm: " in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        (lambda batch, hyper: (batch.rewards, None), "gives targets of shape None, expected \\(8, 8\\)"),
        (lambda batch, hyper: (batch.rewards[:, :1], batch.rewards), "gives advantages of shape \\(8, 1\\), expected"),
    ],
)
def test_advantages_of_another_shape_are_refused_by_name(advantages, message):
    with process_group():
        learner, batch = play(config("algorithm=ppo"))
        learner.policy = replace(learner.policy, algorithm=replace(learner.policy.algorithm, advantages=advantages))
        with pytest.raises(MarlRayError, match=f"algorithm ppo: its `advantages` {message}"):
            learner.update(batch, 0, 0, CostStats(None, 0))


def test_a_spec_and_its_functions_must_fit():
    with pytest.raises(MarlRayError, match="its spec asks for a `critic_targets`"):
        replace(algorithm_of("ppo"), spec=SPECS["direct_dapo"])
    with pytest.raises(MarlRayError, match="its spec asks for no `multiplier`"):
        replace(algorithm_of("ppo_lagrangian"), spec=SPECS["ppo"])
    with pytest.raises(MarlRayError, match="'bogus' is no field of HyperParameters"):
        AlgorithmSpec("Mine", "-", keys=("bogus",))
    assert algorithm_of(OWN).spec.hyper is not HyperParameters


class Recorder:
    """Hyper-parameters that note which of them are read."""

    def __init__(self, hyper: HyperParameters):
        self.hyper, self.read = hyper, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name in HyperParameters.model_fields:
            self.read.add(name)
        elif name == "clip_range":
            self.read |= {"clip", "clip_high"}
        return getattr(self.hyper, name)


EVERYTHING = {
    "kl_coef": 0.1,
    "kl_target": 0.01,
    "entropy_target": 0.5,
    "target_kl": 10.0,
    "overlong_buffer": 2,
    "importance_cap": 2.0,
}
"""Settings that switch on the parts that other keys belong to."""
BY_OTHERS = {"lr_decay", "lr_warmup", "dynamic_sampling"}
"""Read outside of an update: between updates, and by the collector."""


@pytest.mark.parametrize("name", PLAYING)
def test_an_algorithm_reads_every_key_that_its_spec_names(name):
    spec = SPECS[name]
    overrides = [f"hyper.{key}={value}" for key, value in EVERYTHING.items() if key in spec.read_keys]
    ways = [["hyper.kl_place=loss"], ["hyper.kl_place=reward"]] if "kl_place" in spec.read_keys else [[]]
    if "aggregation" in spec.read_keys:
        ways.append(["hyper.aggregation=fixed-length", "hyper.advantage_norm=batch"])
    keys_read: set[str] = set()
    with process_group():
        for way in ways:
            run = short(name, TWO_POLICIES, "train.rollout=episodes", *overrides, *way)
            trained, batch = play(run)
            model = trained.policy.rollout_model.requires_grad_(True)
            hyper: Any = Recorder(run.hyper_of("first"))
            mesh = init_device_mesh("cpu", (1,))
            settings = LearnerSettings(
                name, hyper, constraints=run.constraints, horizon=run.train.horizon, has_whole_episodes=True
            )
            learner = Learner(model, mesh, settings)
            factor = torch.ones(len(batch.mask) // batch.agents, batch.mask.shape[1])
            learner.update(batch, 0, 0, CostStats((4.5,), 3, 6.0), factor)
            keys_read |= hyper.read
    assert sorted(spec.read_keys - keys_read - BY_OTHERS) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"greedy": True}, "greedy"),
        ({"critic_first": True}, "critic_first"),
        ({"constraint": "penalty"}, "constraint"),
        ({"critic": "centrall"}, "critic"),
        ({"defaults": {"gamma": 7.0}}, "defaults: gamma: expected a number of at most 1"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused_by_name(fields, message):
    with pytest.raises(MarlRayError, match=f"^AlgorithmSpec 'Own': {message}"):
        AlgorithmSpec("Own", "no paper", **fields)
