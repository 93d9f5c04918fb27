"""Language models learn the same however a batch is divided, and continue bit for bit. No Ray."""

import json
import math
from dataclasses import replace

import pytest
import torch
from toy_runs.runs import PLAYING, batch_of, team_of, timeless
from toys.texts import config

from marl_ray.config import SPECS, GenerationConfig, ModelConfig, parse_config
from marl_ray.config.sweep import SweepConfig
from marl_ray.policies.language.token_policy import build_token_policy
from marl_ray.training.costs import CostStats
from marl_ray.training.learner.minibatches import BatchShare, minibatches
from marl_ray.training.learner.pass_loss import ScoredPass
from marl_ray.training.learner.preparation.prepare import prepare_batch
from marl_ray.training.single_process import train_alone
from marl_ray.training.team import gpu_pass_limit
from marl_ray.training.team.gpu_pass_limit import fits_beside_weights, rows_that_fit, trial_pass
from marl_ray.tuning.search.metric_names import check_metrics, metric_names

pytestmark = pytest.mark.usefixtures("alone")

LANGUAGE = [name for name in PLAYING if SPECS[name].token_policies and SPECS[name].critic != "central"]


def needs_of(algorithm: str) -> list[str]:
    costs = ["constraints=[{budget: 2}]", "env={id: 'toys.texts:echo', kwargs: {cost: [tokens]}}"]
    return [f"algorithm={algorithm}", *(costs if SPECS[algorithm].needs_costs else [])]


@pytest.mark.parametrize("algorithm", LANGUAGE)
def test_micro_batches_change_nothing(algorithm):
    brief = [*needs_of(algorithm), "train.total_steps=16", "hyper.kl_coef=0.1", "hyper.minibatches=2"]
    undivided = train_alone(config(*brief))
    parts = train_alone(config(*brief, "train.micro_batch=1"))
    assert undivided[-1]["grad_norm"] > 0
    sweep = {"name": "s", "run": {}, "space": {"hyper.lr": {"choice": [0.1]}}, "search": "tpe", "budget": {"trials": 1}}
    reported = [{"name": name} for name in undivided[-1]]
    check_metrics(parse_config(SweepConfig, sweep | {"metric": reported}), config(*brief))
    names = {name for name in metric_names(config(*brief)) if not name.startswith(("eval/", "best/"))}
    assert names - {"score"} <= {*undivided[-1]}  # sweeps add the score
    for a, b in zip(timeless(undivided), timeless(parts), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "pid_lagrangian"])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, algorithm):
    more = [*needs_of(algorithm), "train.curriculum=easiest_first", "hyper.kl_coef=0.1", "hyper.kl_target=0.01"]
    uninterrupted = train_alone(config(*more), tmp_path / "whole")
    resumed = train_alone(config(*more), tmp_path / "again", tmp_path / "whole" / "1")
    assert timeless(uninterrupted)[1:] == timeless(resumed)
    states = [json.loads((tmp_path / name / "3" / "state.json").read_text()) for name in ("whole", "again")]
    for state in states:
        state["metrics"] = timeless([state["metrics"]])
        assert state.pop("seconds") > 0
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("alone", "two", "free", "rows"),
    [
        (3, 5, 11, 5),
        (3, 5, 12.9, 5),
        (3, 5, 3, 1),
        (9, 12, 5, 1),
        (4, 4, 7, 4),
        (4, math.inf, 9, 1),
        (4, math.inf, 3, 1),
    ],
)
def test_passes_take_as_many_rows_as_fit(alone, two, free, rows):
    assert rows_that_fit(alone, two, free) == rows


@pytest.mark.parametrize(
    ("alone", "two", "free", "rows", "fits"),
    [
        (10.0, 14.0, 50.0, 1, True),
        (10.0, 14.0, 50.0, 3, True),
        (10.0, 14.0, 50.0, 4, False),
        (10.0, math.inf, 40.0, 1, True),
        (10.0, math.inf, 39.0, 1, False),
    ],
)
def test_passes_fit_beside_all_weights_where_their_rows_leave_room(alone, two, free, rows, fits):
    assert fits_beside_weights(30.0, alone, two, free, rows) == fits


@pytest.mark.parametrize(("free", "micro_batch", "once"), [(100.0, 4, True), (100.0, None, False), (45.0, 4, False)])
def test_a_large_model_is_gathered_once_where_a_gpu_has_room_for_its_passes_beside_it(
    monkeypatch, free, micro_batch, once
):
    (learner,) = team_of(
        config(*([] if micro_batch is None else [f"train.micro_batch={micro_batch}"]))
    ).learners.values()
    learner.policy = replace(learner.policy, device=torch.device("cuda"))
    model = learner.policy.model
    model.sharded = replace(model.sharded, gathers_once=False, gathered_bytes=30)
    monkeypatch.setattr(gpu_pass_limit, "peak_bytes", lambda policy, rows, learn_entropy: 10.0 + 4 * (rows - 1))
    monkeypatch.setattr(gpu_pass_limit, "free_bytes", lambda policy: free / gpu_pass_limit.USABLE_MEMORY_SHARE)
    limits = gpu_pass_limit.measure_pass_limits({"speaker": learner})
    assert limits == {"speaker": 1 + int((free - 10) // 4)}
    assert model.sharded.gathers_once == once


def test_a_rehearsed_pass_leaves_nothing_behind():
    policy = build_token_policy(ModelConfig(preset="tiny-0.2m", context=16), GenerationConfig(max_tokens=4), 0, True, 1)
    trial_pass(policy, 2, learn_entropy=True)
    assert all(parameter.grad is None for parameter in policy.parameters())


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_the_entropy_has_gradients_only_where_it_counts(coefficient):
    run = config(f"hyper.entropy_coef={coefficient}")
    team = team_of(run)
    learner, rows = team.learners["speaker"], batch_of(run, team).trajectories["speaker"]
    policy, share = learner.policy, BatchShare(1, rows.mask.shape[1], 0, learner.policy.family.copy_bounds(rows, 1))
    plan = [minibatches(0, 0, 0, 1, share, True)]
    ready, state, _ = prepare_batch(policy, learner.state, rows, share, plan, CostStats(None, 0), None, "here")
    entropy = ScoredPass(policy, state, ready, plan[0][0], True).entropy
    assert entropy.requires_grad == bool(coefficient)
    assert entropy.any()
