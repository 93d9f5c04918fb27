"""Responses of an engine with code of its own for the model: their log-probabilities are compared, their version checked."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_runs.runs import batch_of, team_of
from toys.collectors import ALONE, Scripted, collector, players
from toys.text_envs import Echo
from toys.texts import config

from marl_ray.config.run.model import GenerationConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.engines.base import Completion, Prompt
from marl_ray.training.costs import CostStats
from marl_ray.training.learner.minibatches import BatchShare, minibatches
from marl_ray.training.learner.preparation.prepare import prepare_batch
from marl_ray.training.loop.callbacks import Metrics, RunCallbacks
from marl_ray.training.loop.iterations import run_worker

pytestmark = pytest.mark.usefixtures("alone")


def prepare(shift: float, *overrides: str) -> tuple[Any, dict[str, float]]:
    """The prepared batch and metrics of a learner whose engine reports log-probabilities that are off by `shift` nats."""
    run = config(*overrides)
    team = team_of(run)
    learner = team.learners["speaker"]
    batch = batch_of(run, team)
    rows = batch.trajectories["speaker"]
    rows = replace(rows, log_probs=rows.log_probs + shift)
    policy = replace(learner.policy, settings=replace(learner.policy.settings, has_other_engine=True))
    share = BatchShare(1, rows.mask.shape[1], 0, policy.family.copy_bounds(rows, 1))
    plan = [minibatches(0, 0, 0, 1, share, True)]
    ready, _, metrics = prepare_batch(policy, learner.state, rows, share, plan, CostStats(None, 0), None, "here")
    return ready, metrics


def test_the_gap_is_measured_and_the_learners_own_log_probs_are_the_old_ones():
    ready, metrics = prepare(0.25)
    assert metrics["engine/log_prob_gap"] == pytest.approx(0.25, abs=1e-5)
    difference = (ready.behaviour_log_probs - ready.old.log_probs)[ready.mask]
    assert torch.allclose(difference, torch.tensor(0.25), atol=1e-5)
    assert ready.importance is None


def test_where_it_samples_in_fewer_digits_its_tokens_are_weighed_up_to_a_bound():
    ready, _ = prepare(-5.0, "team.speaker.model.dtype=bf16")
    assert torch.all(ready.importance[ready.mask] == 2)
    ready, _ = prepare(-5.0, "team.speaker.model.dtype=bf16", "hyper.importance_cap=3")
    assert torch.all(ready.importance[ready.mask] == 3)


class Late(Scripted):
    """Answers with the weights after the first update."""

    def generate(
        self, prompts: Sequence[Prompt], seed: int, generation: GenerationConfig | None = None
    ) -> list[Completion]:
        return [replace(answer, version=1) for answer in super().generate(prompts, seed, generation)]


def test_responses_of_another_version_train_nobody():
    with pytest.raises(MarlRayError, match=r"responses are of versions \[1\] of the weights, expected 0"):
        collector(Echo, ALONE).collect(players(ALONE, Late()), 0)


class Refusing(Scripted):
    """Cannot start."""

    def start(self) -> None:
        raise MarlRayError("no room for keys and values")


def test_an_engine_that_refuses_to_start_ends_the_run_before_its_warm_start():
    run = config("warm_start={data: env, count: 8}", "team.speaker.generation.engine=vllm")
    phases: list[str] = []
    rows: list[Metrics] = []
    with pytest.raises(MarlRayError, match="no room for keys and values"):
        run_worker(
            run,
            torch.device("cpu"),
            callbacks=RunCallbacks(rows.append, phase=phases.append),
            engine_of=lambda name, policy: Refusing(),
        )
    assert (phases, rows) == (["loading the models", "starting the engines"], [])
