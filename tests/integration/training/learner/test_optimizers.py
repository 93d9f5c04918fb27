"""The optimiser of a policy: what it moves by how much, and that it continues bit for bit. No Ray."""

import json

import pytest
import torch
from torch import nn
from toy_models.tokens import LORA, tiny
from toy_runs import runs as toy_runs
from toy_runs.runs import batch_of, team_of, timeless
from toys import texts as toy_texts

from marl_ray.config import HyperParameters, RunConfig
from marl_ray.training.costs import CostStats
from marl_ray.training.imitation import fine_tuning
from marl_ray.training.learner.optimizers import optimizer_of
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.single_process import train_alone

pytestmark = pytest.mark.usefixtures("alone")

FAMILIES = {"actor-critic": toy_runs.config, "language": toy_texts.config}
EVERYTHING = [
    "hyper.lr_decay=true",
    "hyper.lr_warmup=3",
    "hyper.weight_decay=0.1",
    "hyper.minibatches=2",
    "checkpoint.every=1",
]


def learner(run: RunConfig) -> Learner:
    return next(iter(team_of(run).learners.values()))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_families_have_every_key_of_the_optimiser(family):
    keys = ["hyper.adam_betas=[0.8,0.95]", "hyper.adam_eps=1e-4", "hyper.weight_decay=0.1", "hyper.critic_lr=0.5"]
    optimizer = learner(FAMILIES[family]("algorithm=ppo", *keys)).policy.optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.95), 1e-4)}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.1, 0.0}
    assert {group["lr"] for group in optimizer.param_groups} == {FAMILIES[family]().hyper.lr, 0.5}
    assert isinstance(
        learner(FAMILIES[family]("algorithm=ppo", "hyper.optimizer=sgd")).policy.optimizer, torch.optim.SGD
    )


@pytest.mark.parametrize("lora", [None, LORA])
def test_weight_decay_leaves_norms_biases_and_embeddings_alone(lora):
    policy = tiny(lora=lora)
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    optimizer = optimizer_of(HyperParameters(weight_decay=0.1), [([policy.lm], 1.0), (policy.heads, 1.0)])
    decay = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert set(decay) == {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    for name, share in decay.items():
        assert share == (0.0 if "norm" in name or name.endswith("bias") or "embed" in name else 0.1), name
    assert {0.1, 0.0} == set(decay.values())


def test_weight_decay_is_apart_from_the_gradient():
    layer = nn.Linear(2, 1)
    for optimizer in ("adamw", "sgd"):
        before = [parameter.detach().clone() for parameter in layer.parameters()]
        steps = optimizer_of(HyperParameters(optimizer=optimizer, weight_decay=0.5), [([layer], 0.1)])
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        steps.step()
        torch.testing.assert_close(layer.weight, before[0] * 0.95)
        assert torch.equal(layer.bias, before[1])


def test_rates_rise_batch_by_batch_and_fall_with_the_steps():
    run = toy_runs.config("hyper.lr=0.01", "hyper.critic_lr=0.02", "hyper.lr_decay=true", "hyper.lr_warmup=4")
    warmed, rates = learner(run), []
    for batch in range(6):
        warmed.set_progress(batch / 6, batch)
        rates.append([group["lr"] for group in warmed.policy.optimizer.param_groups])
    scales = [min(1, (batch + 1) / 4) * (1 - batch / 6) for batch in range(6)]
    for rate, scale in zip(rates, scales, strict=True):
        assert sorted(set(rate)) == pytest.approx([0.01 * scale, 0.02 * scale])
    assert warmed.trust_region == pytest.approx(warmed.policy.hyper.trust_region * scales[-1])
    still = learner(toy_runs.config())
    still.set_progress(0.5, 0)
    assert {group["lr"] for group in still.policy.optimizer.param_groups} == {0.01}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_warms_up_and_decays_goes_on_bit_for_bit(tmp_path, family, optimizer):
    overrides = [*EVERYTHING, f"hyper.optimizer={optimizer}", "algorithm=ppo"]
    run = FAMILIES[family](*overrides, "train.group_size=1")
    uninterrupted = train_alone(run, tmp_path / "whole")
    resumed = train_alone(run, tmp_path / "again", tmp_path / "whole" / "1")
    assert timeless(resumed) == timeless(uninterrupted)[-len(resumed) :]
    last = max(int(path.name) for path in (tmp_path / "whole").iterdir())
    assert last > 1
    ends = [json.loads((tmp_path / name / str(last) / "state.json").read_text()) for name in ("whole", "again")]
    assert ends[0]["learners"] == ends[1]["learners"]
    bundles = [path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("bundle/**/*.safetensors")]
    assert bundles
    for path in bundles:
        assert (tmp_path / "whole" / path).read_bytes() == (tmp_path / "again" / path).read_bytes()


@pytest.mark.parametrize(("settings", "rate"), [("{data: environment}", 0.01), ("{data: environment, lr: 0.5}", 0.5)])
def test_a_warm_start_has_the_same_keys_and_a_rate_of_its_own(settings, rate):
    keys = [f"warm_start={settings}", "hyper.lr=1e-3", "hyper.weight_decay=0.1", "hyper.adam_betas=[0.8,0.95]"]
    run = toy_texts.config(*keys)
    assert run.warm_start is not None
    groups = fine_tuning.DemonstrationFit("speaker", learner(run).policy, [], run.warm_start).optimizer.param_groups
    assert [(group["lr"], group["betas"]) for group in groups] == [(pytest.approx(rate), (0.8, 0.95))] * 2
    assert {group["weight_decay"] for group in groups} == {0.1, 0.0}


def test_the_critics_weight_scales_their_loss_alone():
    """Plain gradient descent shows it: the critic's first step is as much shorter, the actor's is the same."""
    moved: dict[float, list[torch.Tensor]] = {}
    for weight in (1.0, 0.25):
        keys = ["algorithm=ppo", "hyper.optimizer=sgd", "hyper.epochs=1", "hyper.minibatches=1"]
        run = toy_runs.config(*keys, f"hyper.value_coef={weight}")
        team = team_of(run)
        (policy,) = team.learners
        trained = team.learners[policy]
        before = [p.detach().clone() for p in trained.policy.rollout_model.parameters()]
        batch = batch_of(run, team)
        trained.update(batch.trajectories[policy], 0, 0, CostStats(None, 0))
        moved[weight] = [p - q for p, q in zip(trained.policy.rollout_model.parameters(), before, strict=True)]
    names = [name for name, _ in trained.policy.rollout_model.named_parameters()]
    for name, full, part in zip(names, moved[1.0], moved[0.25], strict=True):
        torch.testing.assert_close(part, full * (0.25 if name.startswith("critic") else 1.0), atol=1e-7, rtol=1e-4)
