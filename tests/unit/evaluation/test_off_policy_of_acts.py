"""A bundle's value, estimated from what others were served, is the value that it has."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from toy_serving.logged_acts import sequence, toy_bundle, write

from marl_ray.errors import MarlRayError
from marl_ray.evaluation.off_policy.acts import (
    estimate_outcome,
    evaluate_bundle,
    evaluate_doubly_robust,
    log_weights,
    logged_for,
    start_features,
)
from marl_ray.evaluation.off_policy.estimates import cross_fit
from marl_ray.policies.bundles.actor_critic import MAX_ROWS, ActorCriticBundle

STEPS, STATES, CHANCE = 3, 3, 0.8
OBSERVATION, ACTION = spaces.MultiDiscrete([STEPS, STATES]), spaces.Discrete(2, start=1)
AGENTS = ("left", "right")
UNITS = 4000
REWARDS = np.random.default_rng(5).normal(size=(STATES, 2, 2))
START = np.array([0.0, 3.0, -3.0])
"""The part of a unit's outcome that is due to its first state."""


def bundle(folder: Path, seed: int, scale: float = 0.1) -> ActorCriticBundle:
    return toy_bundle(folder, seed, OBSERVATION, ACTION, AGENTS, scale)


def move(state: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The state to which the joint action leads, with probability CHANCE; otherwise nothing moves."""
    return (state + 1 + left + right) % STATES


def true_value(policy: ActorCriticBundle) -> float:
    """By dynamic programming over times, states and joint actions."""
    value = np.zeros(STATES)
    for time in reversed(range(STEPS)):
        rows = torch.tensor([[time, state] for state in range(STATES) for _ in range(2)], dtype=torch.int8)
        chances = policy.log_probs("p", rows, torch.tensor([0, 1] * STATES)).exp().reshape(STATES, 2).double().numpy()
        before = value
        value = np.zeros(STATES)
        for state in range(STATES):
            for left in range(2):
                for right in range(2):
                    chance = chances[state, left] * chances[state, right]
                    after = before[move(state, left, right)]
                    earned = REWARDS[state, left, right] + CHANCE * after + (1 - CHANCE) * before[state]
                    value[state] += chance * earned
    return float((value + START).mean())


def log(path: Path, policy: ActorCriticBundle, seed: int = 0, units: int = UNITS, first: int = 0, **other) -> str:
    """Units that the policy was served in; outcomes have noise of their own."""
    random = np.random.default_rng(seed)
    state = random.integers(STATES, size=units)
    outcome = START[state] + random.normal(size=units)
    seen, taken, chances = [], [], []
    for time in range(STEPS):
        observations = np.stack([np.full(units, time), state], 1)
        acts = [policy.policies["p"].act(observations, random.random((units, 1))) for _ in AGENTS]
        (left, _), (right, _) = acts
        outcome += REWARDS[state, left - 1, right - 1]
        seen.append(observations)
        taken.append(np.stack([left, right]))
        chances.append(np.stack([chance for _, chance in acts]))
        state = np.where(random.random(units) < CHANCE, move(state, left - 1, right - 1), state)
    observed, actions, log_probs = np.stack(seen, 1), np.stack(taken, 2), np.stack(chances, 2)
    rows = [
        sequence(first + u, name, float(outcome[u]), observed[u], actions[a, u], log_probs[a, u], **other)
        for u in range(units)
        for a, name in enumerate(AGENTS)
    ]
    return write(path, rows)


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory) -> ActorCriticBundle:
    return bundle(tmp_path_factory.mktemp("bundles"), 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory, behaviour) -> str:
    return log(tmp_path_factory.mktemp("log") / "part.parquet", behaviour)


@pytest.mark.parametrize("seed", range(2, 6))
def test_the_estimate_is_the_true_value_within_its_error(tmp_path, data, behaviour, seed):
    target = bundle(tmp_path, seed)
    truth = true_value(target)
    for estimate in (evaluate_bundle, evaluate_doubly_robust):
        value = estimate(target, data)
        assert abs(value.estimate - truth) < 3 * value.error, estimate.__name__
        assert value.effective > 100 and value.low < value.estimate
        assert abs(value.mean_weight - 1) < 0.1


def test_the_targets_differ_from_the_log_by_more_than_the_errors(tmp_path, data, behaviour):
    """So that the test before this one could not be passed by the logged mean."""
    targets = [bundle(tmp_path, seed) for seed in range(2, 6)]
    apart = [abs(true_value(t) - true_value(behaviour)) / evaluate_bundle(t, data).error for t in targets]
    assert max(apart) > 5


def test_a_model_of_the_start_makes_the_error_smaller(tmp_path, data):
    target = bundle(tmp_path, 2)
    assert evaluate_doubly_robust(target, data).error < 0.8 * evaluate_bundle(target, data).error


def test_a_bundle_on_its_own_log_has_weights_of_one_and_the_logged_mean(data, behaviour):
    logged = logged_for(behaviour, data)
    assert np.abs(log_weights(behaviour, logged)).max() < 1e-5
    value = evaluate_bundle(behaviour, logged)
    assert value.estimate == pytest.approx(logged.outcomes.mean(), abs=1e-5)
    assert value.mean_weight == pytest.approx(1, abs=1e-5) and value.effective == pytest.approx(UNITS)


def test_logs_of_several_arms_are_judged_together(tmp_path, data, behaviour):
    other, target = bundle(tmp_path, 3), bundle(tmp_path, 2)
    log(tmp_path / "log" / "one.parquet", behaviour)
    log(tmp_path / "log" / "two.parquet", other, seed=1, first=UNITS, digest="f")
    value = evaluate_bundle(target, str(tmp_path / "log"))
    assert abs(value.estimate - true_value(target)) < 3 * value.error


def test_greedy_units_are_left_out(tmp_path, data, behaviour):
    target = bundle(tmp_path, 2)
    log(tmp_path / "log" / "one.parquet", behaviour)
    log(tmp_path / "log" / "two.parquet", behaviour, seed=1, units=50, first=UNITS, greedy=True)
    value = estimate_outcome(target, str(tmp_path / "log"), floor=-100)
    assert value.value == evaluate_bundle(target, data)
    assert (value.units, value.greedy_units) == (UNITS, 50)
    with pytest.raises(
        MarlRayError, match=r"^data: expected units whose actions were drawn, but in every one an agent acted greedily$"
    ):
        estimate_outcome(target, str(tmp_path / "log" / "two.parquet"), floor=-100)


def test_a_bundle_passes_where_its_lower_bound_is_above_the_floor(tmp_path, data, behaviour):
    low = estimate_outcome(behaviour, data, floor=0).value.low
    assert estimate_outcome(behaviour, data, floor=low - 0.01).gate.passed
    refused = estimate_outcome(behaviour, data, floor=low + 0.01).gate
    assert not refused.passed and "lower bound" in refused.reason
    assert "effective" in estimate_outcome(behaviour, data, floor=-100, min_effective=UNITS + 1).gate.reason


def test_a_bundle_that_the_log_does_not_cover_is_refused(tmp_path, behaviour):
    """All weights alike, and tiny: the self-normalised estimate is the logged mean, with a small error."""
    always = [sequence(u, "left", float(u % 7), [(0, 0)], [1], [0.0]) for u in range(500)]
    data = write(tmp_path / "x.parquet", always)
    value, gate = (getattr(estimate_outcome(behaviour, data, floor=0), name) for name in ("value", "gate"))
    assert value.low > 2 and value.effective == pytest.approx(500)
    assert not gate.passed and "does not cover" in gate.reason


def test_forced_moves_count_nothing_and_masks_count(tmp_path, behaviour):
    rows, allowed = np.zeros((2, 2), np.int64), np.array([[True, False], [True, True]])
    actions, chances = behaviour.policies["p"].act(rows, np.array([[0.9], [0.1]]), allowed)
    masks = {"action_masks": allowed.tolist(), "mask": [False, True]}
    row = sequence(0, "left", 1.0, rows, actions, [-9.0, chances[1]], **masks)
    logged = logged_for(behaviour, write(tmp_path / "x.parquet", [row]))
    assert log_weights(behaviour, logged) == pytest.approx([0], abs=1e-6)


def test_continuous_actions_are_weighed_by_density_unless_they_were_clipped(tmp_path):
    space = spaces.Box(-5, 5, (2,), np.float32)
    policy = toy_bundle(tmp_path, 0, spaces.Box(-1, 1, (3,), np.float32), space, ("only",), 0.1)
    seen = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    actions, chances = policy.policies["p"].act(seen, np.random.default_rng(1).random((20, 2)))
    inside = write(tmp_path / "x.parquet", [sequence(0, "only", 1.0, seen, actions, chances)])
    assert log_weights(policy, logged_for(policy, inside)) == pytest.approx([0], abs=1e-4)
    actions[3, 1] = 5.0
    clipped = write(tmp_path / "x.parquet", [sequence(0, "only", 1.0, seen, actions, chances)])
    with pytest.raises(MarlRayError, match="1 of 20 lie at a bound"):
        evaluate_bundle(policy, clipped)


def test_a_log_of_other_agents_is_refused_by_name(tmp_path, data):
    other = toy_bundle(tmp_path, 0, OBSERVATION, ACTION, ("left",))
    with pytest.raises(MarlRayError, match=r"/part\.parquet: row 1, column agent: expected one of left$"):
        evaluate_bundle(other, data)


def test_log_probabilities_are_the_same_in_one_pass_and_in_several(behaviour):
    rows = torch.tensor([[0, 0], [1, 2], [2, 1]], dtype=torch.int8).repeat(MAX_ROWS // 3 + 2, 1)
    actions = torch.arange(len(rows)) % 2
    log_probs = behaviour.log_probs("p", rows, actions)
    assert log_probs.shape == (len(rows),)
    torch.testing.assert_close(log_probs[-6:], behaviour.log_probs("p", rows[-6:], actions[-6:]))
    torch.testing.assert_close(
        log_probs[:6].exp() + behaviour.log_probs("p", rows[:6], 1 - actions[:6]).exp(), torch.ones(6)
    )


def test_wide_starts_are_projected(tmp_path):
    image = spaces.Box(0, 255, (16, 16, 3), np.uint8)
    policy = toy_bundle(tmp_path, 0, image, ACTION, ("only",))
    rows = [sequence(u, "only", 1.0, np.full((1, 768), u), [1], [-0.7]) for u in range(4)]
    features = start_features(policy, logged_for(policy, write(tmp_path / "x.parquet", rows)))
    assert features.shape == (4, 256)
    assert features[3] == pytest.approx(3 * features[1])


def test_predictions_are_of_units_that_were_not_seen():
    random = np.random.default_rng(0)
    features, noise = random.normal(size=(60, 80)), random.normal(size=60)
    predicted = cross_fit(features, noise, np.zeros(60))
    assert np.corrcoef(predicted, noise)[0, 1] < 0.5, "a model that saw them would fit all noise"
    line = features[:, 0] * 2 + 1
    assert np.abs(cross_fit(features[:, :3], line, np.zeros(60)) - line).max() < 0.5
