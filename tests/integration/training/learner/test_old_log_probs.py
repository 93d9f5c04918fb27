"""An update begins with ratios of exactly 1, also where bfloat16 samples or learns, whatever was recorded. No Ray."""

from dataclasses import replace
from typing import Any

import pytest
from toy_runs import runs as toy_runs
from toy_runs.runs import batch_of, team_of
from toys import texts as toy_texts

from marl_ray.algorithms import PolicyLoss, PolicyLossInputs
from marl_ray.config import SPECS, RunConfig
from marl_ray.training.costs import CostStats
from marl_ray.training.learner.policy_update import Learner
from marl_ray.training.single_process import train_alone
from marl_ray.trajectories import Trajectories

pytestmark = pytest.mark.usefixtures("alone")

LANGUAGE = [name for name in toy_runs.PLAYING if SPECS[name].token_policies and SPECS[name].critic != "central"]
WAYS = {
    "both": ["resources.mixed_precision=bf16", "team.speaker.model.dtype=bf16"],
    "the sampler": ["team.speaker.model.dtype=bf16"],
    "the learner": ["resources.mixed_precision=bf16", "team.speaker.model.dtype=fp32"],
    "adapters": [
        "resources.mixed_precision=bf16",
        "team.speaker.model.dtype=bf16",
        "team.speaker.model.lora={rank: 2, alpha: 4}",
    ],
}
STILL = "hyper.lr=1e-30"


def texts(algorithm: str, *overrides: str) -> RunConfig:
    costs = ["constraints=[{budget: 2}]", "env={id: 'toys.texts:echo', kwargs: {cost: [tokens]}}"]
    return toy_texts.config(f"algorithm={algorithm}", *(costs if SPECS[algorithm].needs_costs else []), *overrides)


def begin(run: RunConfig, mixed: bool) -> tuple[Learner, Trajectories]:
    """The only policy's learner and a batch of it."""
    team = team_of(run, mixed)
    (name,) = team.learners
    return team.learners[name], batch_of(run, team).trajectories[name]


def record_inputs(learner: Learner) -> list[PolicyLossInputs]:
    """Record the arguments of the policy's loss from now on."""
    evaluations: list[PolicyLossInputs] = []
    plain = learner.policy.algorithm.policy_loss

    def loss(evaluated: PolicyLossInputs, hyper: Any) -> PolicyLoss:
        evaluations.append(evaluated)
        return plain(evaluated, hyper)

    learner.policy = replace(learner.policy, algorithm=replace(learner.policy.algorithm, policy_loss=loss))
    return evaluations


@pytest.mark.parametrize("algorithm", LANGUAGE)
def test_the_first_step_of_every_algorithm_clips_nothing(algorithm):
    rows = train_alone(texts(algorithm, *WAYS["both"], "train.total_steps=16"))
    learned = [row for row in rows if "kl" in row]
    assert [(row["clip_fraction"], row["kl"]) for row in learned] == [(0.0, 0.0)] * len(learned)
    assert learned[-1]["grad_norm"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_all_passes_of_unmoved_weights_agree_to_the_bit(way):
    """With as many minibatches and passes as there may be: they are the passes that the old log-probabilities are from."""
    more = ["train.env_copies=16", "train.total_steps=16", "hyper.minibatches=2", "train.micro_batch=3", STILL]
    (row,) = train_alone(texts("gspo", *WAYS[way], *more, "hyper.kl_coef=0.1"))
    assert (row["clip_fraction"], row["kl"]) == (0.0, 0.0)
    assert row["reference_kl"] == pytest.approx(0, abs=1e-4)


def test_later_epochs_agree_within_rounding():
    more = ["train.env_copies=16", "train.total_steps=16", "hyper.minibatches=2", "hyper.epochs=3", STILL]
    (row,) = train_alone(texts("rloo", *WAYS["both"], *more))
    assert row["clip_fraction"] == 0.0
    assert row["kl"] < 1e-4


@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_sampled_is_still_known(minibatches):
    """`importance_cap` weighs by it, and an algorithm of one's own may."""
    run = texts("grpo", *WAYS["both"], "hyper.importance_cap=1.0", f"hyper.minibatches={minibatches}", STILL)
    learner, batch = begin(run, mixed=True)
    evaluations = record_inputs(learner)
    learner.update(batch, 0, 0, CostStats(None, 0))
    assert len(evaluations) == minibatches
    for evaluation in evaluations:
        assert bool((evaluation.log_probs == evaluation.old_log_probs).all())
        assert not bool((evaluation.behaviour_log_probs == evaluation.old_log_probs)[evaluation.mask].all())
        assert float((evaluation.behaviour_log_probs - evaluation.old_log_probs)[evaluation.mask].abs().max()) < 0.1


@pytest.mark.parametrize(
    ("overrides", "mixed", "passes"),
    [
        ([*WAYS["both"]], True, 1),
        ([*WAYS["both"], "hyper.minibatches=2"], True, 4),
        ([*WAYS["both"], "hyper.kl_coef=0.1"], True, 2),  # the reference is a copy
        (["hyper.minibatches=2"], False, 2),
    ],
)
def test_a_pass_more_is_made_only_where_its_result_is_needed(overrides, mixed, passes):
    learner, batch = begin(texts("grpo", *overrides), mixed)
    calls: list[Any] = []
    learner.policy.model.register_forward_hook(lambda *arguments: calls.append(arguments))
    learner.update(batch, 0, 0, CostStats(None, 0))
    assert len(calls) == passes


def test_actor_critics_too():
    run = toy_runs.config("algorithm=ppo", "hyper.epochs=1", "hyper.minibatches=2", STILL)
    for mixed in (False, True):
        learner, batch = begin(run, mixed)
        evaluations = record_inputs(learner)
        learner.update(batch, 0, 0, CostStats(None, 0))
        differences = [
            float((evaluation.log_probs - evaluation.old_log_probs).detach()[evaluation.mask].abs().max())
            for evaluation in evaluations
        ]
        assert max(differences) < (1e-9 if mixed else 1e-5)
        assert learner.policy.must_recompute == mixed


def test_a_trust_region_learns_on_the_copy_that_sampled():
    learner, batch = begin(toy_runs.config("algorithm=cpo", "constraints=[{budget: 4}]"), mixed=True)
    evaluations = record_inputs(learner)
    learner.update(batch, 0, 0, CostStats((4.5,), 3, 6.0))
    assert not learner.policy.must_recompute
    assert (
        float((evaluations[0].log_probs - evaluations[0].old_log_probs).detach()[evaluations[0].mask].abs().max())
        < 1e-5
    )
