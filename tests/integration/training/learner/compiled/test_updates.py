"""The compiled gradient steps and the compiled networks against torch's, on batches of real environments."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from processes.two_workers import two_workers
from toy_runs.runs import batch_of, short, team_of

from marl_ray.config import RunConfig
from marl_ray.policies.actor_critic.compiled import kernels
from marl_ray.training.checkpoints.manifest import FORMAT
from marl_ray.training.costs import CostStats
from marl_ray.training.learner import gradient_epochs
from marl_ray.training.learner.compiled import epochs
from marl_ray.training.learner.minibatches import BatchShare, Selection
from marl_ray.training.learner.preparation.prepare import prepare_batch
from marl_ray.training.loop.assembly import build_run
from marl_ray.training.loop.callbacks import RunCallbacks
from marl_ray.training.loop.run import Run
from marl_ray.training.single_process import process_group

CARTPOLE = "gymnasium.CartPole-v1"
CASES: dict[str, dict[str, Any]] = {
    "plain": {"env": {"id": CARTPOLE}, "network": {"normalize": False}},
    "norm and relu": {"env": {"id": CARTPOLE}, "network": {"activation": "relu", "hidden": [24]}},
    "categories": {"env": {"id": "MultiGrid-Empty-5x5-v0", "kwargs": {"agents": 2}}},
    "three agents and layers": {"env": {"id": "mpe2.simple_spread_v3"}, "network": {"hidden": [32, 16, 8]}},
    "masks and episodes": {"env": {"id": "budget_dag", "kwargs": {"workers": 2}}, "train": {"rollout": "episodes"}},
    "central critic": {"env": {"id": "mpe2.simple_spread_v3"}, "algorithm": "mappo"},
    "central critic over categories": {
        "env": {"id": "MultiGrid-Empty-5x5-v0", "kwargs": {"agents": 2}},
        "algorithm": "mappo",
        "hyper": {"value_clip": 0.01},
    },
    "bounds": {
        "env": {"id": CARTPOLE},
        "hyper": {"dual_clip": 1.5, "value_clip": 0.01, "clip": 0.01, "huber_delta": 0.3, "max_grad_norm": 0.05},
    },
    "decay and early end": {
        "env": {"id": CARTPOLE},
        "hyper": {"weight_decay": 0.1, "critic_lr": 1e-3, "target_kl": 1e-4, "value_clip": None, "lr": 3e-3},
    },
}


def config_of(case: dict[str, Any], **resources: int) -> RunConfig:
    """A short run with several minibatches and epochs."""
    return RunConfig.model_validate(
        {
            "name": "compiled",
            "algorithm": case.get("algorithm", "ippo"),
            "env": case["env"],
            "team": {"all": {"network": case.get("network", {})}},
            "hyper": {"epochs": 3, "minibatches": 2, "lr": 1e-3} | case.get("hyper", {}),
            "train": {"total_steps": 10_000, "env_copies": 8, "horizon": 40} | case.get("train", {}),
            "evaluation": {"every": 0},
            "resources": resources,
        }
    )


def train(config: RunConfig, compiled: bool, iterations: int = 2) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Metrics of some iterations, and the weights after them."""
    run = run_of(config, compiled)
    rows = [run.step() for _ in range(iterations)]
    assert [learner.is_compiled for learner in run.team.learners.values()] == [compiled]
    weights = [parameter.numpy().copy() for parameter in run.team.models["all"].parameters()]
    run.close()
    return rows, weights


def run_of(config: RunConfig, compiled: bool) -> Run:
    """A run of compiled code, or of torch as the reference, which its learners are told to use."""
    run = build_run(config, torch.device("cpu"))
    for learner in run.team.learners.values():
        learner.compiled_refusal = "" if compiled else "torch is the reference"
    return run


def assert_close(actual: tuple[Any, Any], reference: tuple[Any, Any]) -> None:
    """Metrics and weights are equal within 1e-5."""
    for tensor, expected in zip(actual[0], reference[0], strict=True):
        assert tensor.keys() == expected.keys()
        for key in tensor.keys() - {"steps_per_second"}:
            if not key.startswith("time/"):
                assert tensor[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), key
    for tensor, expected in zip(actual[1], reference[1], strict=True):
        np.testing.assert_allclose(tensor, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_iterations_equal_those_of_torch(name):
    config = config_of(CASES[name])
    with process_group():
        assert_close(train(config, True), train(config, False))


def half(config: RunConfig) -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """One of two workers' metrics and weights."""
    return train(config, True)


@pytest.mark.parametrize(
    "name",
    [
        "three agents and layers",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("categories", "central critic")),
    ],
)
def test_two_workers_take_the_steps_of_one(name):
    case = CASES[name]
    with process_group():
        alone = train(config_of(case), True)
    assert_close(two_workers(half, config_of(case, workers=2)), alone)


@pytest.mark.parametrize("name", ["three agents and layers", "categories"])
def test_two_threads_take_the_steps_of_one(name):
    with process_group():
        assert_close(*(train(config_of(CASES[name], threads_per_worker=threads), True) for threads in (2, 1)))


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm=grpo", "its algorithm's critic is none"),
        ("hyper.kl_coef=0.1", "hyper.kl_coef is above 0"),
        ("hyper.optimizer=sgd", "hyper.optimizer is sgd"),
        ("team.all.network.hidden=[512, 512]", "its networks are not small perceptrons over vectors or categories"),
    ],
)
def test_other_updates_stay_with_torch_and_one_line_says_why(override, why):
    env = "env={id: mpe2.simple_spread_v3}", "team={all: {}}", "train.group_size=2"
    config, lines = short("ppo", *env, override), list[str]()
    with process_group():
        run = build_run(config, torch.device("cpu"), callbacks=RunCallbacks(say=lines.append))
        assert [learner.is_compiled for learner in run.team.learners.values()] == [False]
        run.step()
        run.close()
    assert lines == [f"policy 'all': torch takes its gradient steps, because {why}"]


def test_policies_that_are_updated_in_turn_equal_those_of_torch():
    """HAPPO's later policy learns from the change that the earlier one made."""
    teams = "team={chasers: {agents: ['adversary_*']}, prey: {agents: [agent_0]}}"
    config = short("happo", "env={id: mpe2.simple_tag_v3}", teams, "hyper.lr=0.01")

    def rows(compiled: bool) -> list[dict[str, float]]:
        run = run_of(config, compiled)
        metrics = [run.step() for _ in range(3)]
        assert [learner.is_compiled for learner in run.team.learners.values()] == [compiled] * 2
        run.close()
        return metrics

    with process_group():
        assert_close((rows(True), []), (rows(False), []))


def test_torch_takes_the_steps_of_a_policy_whose_settings_no_longer_have_compiled_code():
    with process_group():
        learner = team_of(config_of(CASES["plain"])).learners["all"]
        assert learner.is_compiled
        settings = learner.policy.settings
        token_sum = settings.hyper.model_copy(update={"aggregation": "token-sum"})
        learner.policy = replace(learner.policy, settings=replace(settings, hyper=token_sum))
        assert learner.reason_for_torch == "hyper.aggregation is token-sum"
        learner.policy = replace(learner.policy, settings=settings)
        assert learner.is_compiled


def test_a_gradient_that_differs_from_torch_is_not_used(monkeypatch):
    config, lines = config_of(CASES["plain"]), list[str]()
    with process_group():
        expected = train(config, False)
        monkeypatch.setattr("marl_ray.training.learner.compiled.epochs.TOLERANCE", -1.0)
        run = build_run(config, torch.device("cpu"), callbacks=RunCallbacks(say=lines.append))
        rows = [run.step() for _ in range(2)]
        assert not run.team.learners["all"].is_compiled
        assert rows[1]["policy_loss"] == pytest.approx(expected[0][1]["policy_loss"], abs=1e-5)
        plain = run.team.learners["all"].to_plain()
        run.close()
        monkeypatch.undo()
        resumed = team_of(config).learners["all"]
        assert resumed.is_compiled
        resumed.load_state(plain)
        assert resumed.reason_for_torch == plain["compiled_refusal"]
        branch = team_of(config_of(CASES["plain"] | {"hyper": {"kl_coef": 0.1}})).learners["all"]
        branch.load_state(plain)
        assert branch.reason_for_torch == "hyper.kl_coef is above 0" and not branch.to_plain()["compiled_refusal"]
    # Checkpoints with other keys are of another format, which is refused in one line.
    keys = ["compiled_refusal", "cost_norms", "entropy_coef", "groups", "kl_coef", "multipliers", "value_norm"]
    assert (FORMAT, sorted(plain)) == (3, keys)
    (line,) = lines
    assert line.startswith(
        "policy 'all': torch takes its gradient steps, because compiled gradients differ from torch's"
    )


def test_tanh_is_exact_within_a_millionth():
    rows = np.linspace(-12, 12, 4001, dtype=np.float32)[None]
    expected = np.tanh(rows.astype(np.float64))
    kernels.activate(rows, np.zeros(4001, np.float32), True)
    assert np.abs(rows - expected).max() < 1e-6
    odd = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    kernels.activate(odd, np.zeros(3, np.float32), True)
    assert np.isnan(odd[0, 0]) and odd[0, 1:] == pytest.approx([1, -1], abs=1e-6)


@pytest.mark.parametrize("descend", [gradient_epochs.descend, epochs.descend])
def test_a_minibatch_without_decisions_does_not_lower_the_epochs_kl(descend):
    """The mean that `target_kl` bounds is over the steps that were taken."""

    def after(target_kl: float | None, count: int) -> tuple[float, torch.Tensor]:
        bound = [] if target_kl is None else [f"hyper.target_kl={target_kl}"]
        run = short("ippo", "env={id: mpe2.simple_spread_v3}", *bound)
        team = team_of(run)
        learner, batch = team.learners["shared"], batch_of(run, team).trajectories["shared"]
        quarters = torch.arange(batch.mask.shape[1]).tensor_split(4)
        batch.mask[:, torch.cat(quarters[2:])] = False
        policy = learner.policy
        share = BatchShare(batch.agents, batch.mask.shape[1], 0, policy.family.copy_bounds(batch, batch.agents))
        plan = [[Selection(None, times, share.all_copies) for times in quarters]] * count
        prepared, state, _ = prepare_batch(
            policy, learner.state, batch, share, plan, CostStats((4.5,), 3, 6.0), None, "here"
        )
        _, metrics = descend(policy, state, prepared, "here")
        parameters = policy.model.parameters()
        return metrics["kl"], torch.cat([parameter.full_tensor().flatten() for parameter in parameters])

    with process_group():
        kl, once = after(None, 1)
        assert kl > 0
        assert torch.equal(after(0.75 * kl, 3)[1], once)
        assert not torch.equal(after(1.25 * kl, 2)[1], once)
