"""Gradients do not depend on how a batch is divided into passes, on padding, or on the order of its sequences."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_runs.runs import PLAYING, short, team_of
from toys.texts import config as texts

from marl_ray.algorithms import algorithm_of
from marl_ray.config import SPECS, RunConfig
from marl_ray.envs.registry import make_env
from marl_ray.training.costs import CostStats
from marl_ray.training.learner import forward_passes, gradient_epochs, trust_region_step
from marl_ray.training.learner.optimizers import local_part
from marl_ray.training.learner.trained_policy import TrainedPolicy
from marl_ray.training.loop.collection import build_collector
from marl_ray.trajectories import PER_SEQUENCE, Trajectories

pytestmark = pytest.mark.usefixtures("alone")


def build(config: RunConfig):
    team = team_of(config)
    return team, build_collector(config, make_env(config.env), team.agents, 0, 1)


@pytest.fixture(scope="module")
def played():
    """Algorithm -> (config, team, batch), made once each."""
    made = {}

    def get(name: str):
        if name not in made:
            config = short(
                name, "train.rollout=episodes", "train.env_copies=6", "hyper.minibatches=1", "hyper.epochs=1"
            )
            team, collector = build(config)
            made[name] = config, team, collector.collect(team.players(), 0).trajectories["shared"]
        return made[name]

    return get


def gradients(name: str, team, batch: Trajectories, micro_batch: int | None) -> torch.Tensor:
    """The gradient of the first step on the batch, all networks, by the learner's own code; nothing is changed by it."""
    (learner,) = team.learners.values()
    state = learner.to_plain()
    parts: list[torch.Tensor] = []

    def record(modules, max_norm):
        for module in modules:
            parts.extend(local_part(p.grad).clone().reshape(-1) for p in module.parameters() if p.grad is not None)
        return torch.zeros(len(modules))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_epochs, "clip_gradients", record)
        patch.setattr(forward_passes, "clip_gradients", record)
        patch.setattr(learner.policy.optimizer, "step", lambda: None)
        patch.setattr(
            learner, "compiled_refusal", "it is the reference"
        )  # compiled gradients are compared with it elsewhere
        patch.setattr(learner, "policy", with_settings(learner.policy, micro_batch=micro_batch))
        if algorithm_of(name).spec.constraint == "trust_region":
            unmoved = dict(learner.policy.rollout_model.actor.named_parameters())
            patch.setattr(trust_region_step, "constrained_weights", lambda *arguments: (unmoved, {}))
        learner.update(batch, 0, 0, CostStats((4.5,), 6))
    learner.load_state(state)
    return torch.cat(parts)


def with_hyper(policy: TrainedPolicy, **changes: Any) -> TrainedPolicy:
    return with_settings(policy, hyper=policy.hyper.model_copy(update=changes))


def with_settings(policy: TrainedPolicy, **changes: Any) -> TrainedPolicy:
    return replace(policy, settings=replace(policy.settings, **changes))


def pad(batch: Trajectories, columns: int) -> Trajectories:
    """The batch with steps after its end at which nobody decides."""
    wider = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if value is not None and field.name not in PER_SEQUENCE:
            value = torch.cat([value, value.new_zeros(value.shape[0], columns, *value.shape[2:])], 1)
        wider[field.name] = value
    return Trajectories(**wider)


def shuffle(batch: Trajectories, seed: int) -> Trajectories:
    """The environment copies in another order."""
    copies = len(batch.mask) // batch.agents
    order = torch.randperm(copies, generator=torch.Generator().manual_seed(seed))
    moved = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if value is not None and field.name == "states":
            value = value[order]
        elif value is not None:
            value = value.unflatten(0, (copies, -1))[order].flatten(0, 1)
        moved[field.name] = value
    return Trajectories(**moved)


@pytest.mark.parametrize("name", PLAYING)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(micro_batch=st.none() | st.integers(1, 6), columns=st.integers(0, 3), seed=st.integers(0, 99))
def test_gradients_are_those_of_the_whole_batch(played, name, micro_batch, columns, seed):
    _, team, batch = played(name)
    expected = gradients(name, team, batch, None)
    changed = shuffle(pad(batch, columns), seed)
    got = gradients(name, team, changed, micro_batch)
    assert expected.norm() > 0
    assert (got - expected).norm() / expected.norm() < 1e-6


WITH_CRITICS = [name for name, spec in SPECS.items() if spec.critic != "none" and not spec.critic_first]


@pytest.mark.parametrize("name", WITH_CRITICS)
def test_the_value_clip_takes_nothing_away_before_the_first_step(name):
    check_value_clip(name, short(name, "train.rollout=episodes", "hyper.minibatches=1"))


@pytest.mark.parametrize("name", ["ppo", "p3o"])
def test_nor_does_it_of_language_models(name):
    costs = ["constraints=[{budget: 2}]", "env={id: 'toys.texts:echo', kwargs: {cost: [tokens]}}"]
    check_value_clip(name, texts(f"algorithm={name}", *(costs if SPECS[name].needs_costs else [])))


def check_value_clip(name: str, config: RunConfig) -> None:
    """Check that the first step's gradients with a narrow clip are those without a clip.

    That holds as the normalisers move from batch to batch, and where other weights gathered the batch; of
    cost critics too.
    """
    team, collector = build(config)
    (policy,) = team.learners
    learner = team.learners[policy]
    for iteration in range(3):
        batch = collector.collect(team.players(), iteration).trajectories[policy]
        if iteration == 2 and SPECS[name].constraint != "trust_region":
            learner.policy = with_hyper(learner.policy, importance_cap=2.0)
            with torch.no_grad():
                for parameter in learner.policy.critics[-1].parameters():
                    parameter.mul_(1.5)
        losses = {}
        for clip in (None, 0.01):
            learner.policy = with_hyper(learner.policy, value_clip=clip)
            losses[clip] = gradients(name, team, batch, None)
        assert losses[None].norm() > 0
        torch.testing.assert_close(losses[0.01], losses[None], atol=1e-6, rtol=1e-5)
        learner.update(batch, 0, iteration, CostStats((4.5,), 6))


def test_a_batch_whose_tensors_do_not_fit_is_refused_by_name(played):
    _, _, batch = played("ppo")
    with pytest.raises(ValueError, match=r"trajectories.rewards: expected shape \(12, 6\), got \(11, 6\)"):
        replace(batch, rewards=batch.rewards[:-1])
    with pytest.raises(ValueError, match=r"trajectories.group: expected shape \(12,\)"):
        replace(batch, group=batch.group[:1])
