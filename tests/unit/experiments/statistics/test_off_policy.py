"""Off-policy values and the gate, against plain loops and true values."""

import math

import numpy as np
import pytest
from scipy import stats

from marl_ray.errors import MarlRayError
from marl_ray.experiments.statistics.off_policy import PolicyValue, doubly_robust, exposure_gate, snips


def log_episodes(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """Episodes of three coin actions, reward their number of heads plus noise: log weights, rewards, model, truth."""
    rng = np.random.default_rng(seed)
    behaviour, target = 0.5, 0.7
    actions = rng.random((n, 3)) < behaviour
    rewards = actions.sum(1) + rng.normal(0, 0.5, n)
    new, old = (np.where(actions, math.log(p), math.log(1 - p)).sum(1) for p in (target, behaviour))
    return new - old, rewards, actions.sum(1).astype(float), np.full(n, 2.1), 2.1


def test_off_policy_values_are_the_targets():
    covered = {"snips": 0, "dr": 0}
    errors: dict[str, list[float]] = {"snips": [], "dr": []}
    for seed in range(300):
        weights, rewards, model, target_model, truth = log_episodes(300, seed)
        values = {
            "snips": snips(weights, rewards, 0.1),
            "dr": doubly_robust(weights, rewards, model, target_model, 0.1),
        }
        for name, value in values.items():
            covered[name] += value.low < truth
            errors[name].append(value.estimate - truth)
    for name, misses in errors.items():
        assert abs(np.mean(misses)) < 4 * np.std(misses) / math.sqrt(300) + 0.01
        assert covered[name] / 300 > 0.9 - 3 * math.sqrt(0.09 / 300)
    assert np.std(errors["dr"]) < np.std(errors["snips"]) / 1.2
    # A model that knows nothing costs precision, not truth.
    weights, rewards, _, _, truth = log_episodes(20_000, 1)
    assert doubly_robust(weights, rewards, np.zeros(20_000), np.zeros(20_000), 0.1).estimate == pytest.approx(
        truth, abs=0.05
    )


def test_snips_is_the_loop_and_moves_with_the_rewards():
    weights, rewards, *_ = log_episodes(50, 0)
    w = [math.exp(x) for x in weights]
    estimate = sum(a * r for a, r in zip(w, rewards, strict=True)) / sum(w)
    error = math.sqrt(sum((a * (r - estimate)) ** 2 for a, r in zip(w, rewards, strict=True))) / sum(w)
    value = snips(weights, rewards, 0.05)
    assert (value.estimate, value.error) == pytest.approx((estimate, error))
    assert value.effective == pytest.approx(sum(w) ** 2 / sum(a * a for a in w))
    assert value.mean_weight == pytest.approx(np.mean(w))
    assert value.low == pytest.approx(estimate - stats.t.ppf(0.95, value.effective - 1) * error)
    assert snips(weights, rewards + 7, 0.05).low == pytest.approx(value.low + 7)
    on_policy = snips(np.zeros(50), rewards, 0.05)
    assert (on_policy.estimate, on_policy.effective) == pytest.approx((rewards.mean(), 50))


def test_weights_of_long_episodes_do_not_overflow():
    weights = np.array([2000.0, 2000.0, 1999.0, 1000.0, -math.inf])
    value = snips(weights, np.array([1.0, 2.0, 3.0, 4.0, 5.0]), 0.05)
    assert value.estimate == pytest.approx((1 + 2 + 3 / math.e) / (2 + 1 / math.e))
    assert 2 < value.effective < 3
    assert not exposure_gate(
        doubly_robust(weights, np.ones(5), np.ones(5), np.ones(5), 0.05), floor=0, min_effective=1
    ).passed
    nowhere = snips(np.full(3, -math.inf), np.ones(3), 0.05)
    assert (nowhere.effective, nowhere.low) == (0, -math.inf)
    assert snips(np.zeros(0), np.zeros(0), 0.05).low == -math.inf


@pytest.mark.parametrize(
    ("low", "effective", "passed", "reason"),
    [(0.5, 100.0, True, "above 0.4"), (0.4, 100.0, False, "must be above 0.4"), (0.5, 49.0, False, "50 needed")],
)
def test_gate_needs_bound_and_episodes(low, effective, passed, reason):
    verdict = exposure_gate(PolicyValue(1.0, 0.1, low, effective, 1.0), floor=0.4, min_effective=50)
    assert verdict.passed is passed
    assert reason in verdict.reason


def test_gate_fails_on_what_is_not_known():
    assert not exposure_gate(PolicyValue(math.nan, math.inf, math.nan, math.nan, 1.0), floor=0, min_effective=0).passed
    assert not exposure_gate(
        snips(np.zeros(100), np.ones(100), 0.05), floor=0, min_effective=10
    ).passed  # never differed


def test_off_policy_inputs_are_checked():
    good = np.array([-0.5, -0.5])
    with pytest.raises(MarlRayError, match=r"^rewards: expected shape \(2,\), one per episode, got \(3,\)$"):
        snips(good, np.ones(3), 0.05)
    with pytest.raises(
        MarlRayError, match=r"^target_model: expected finite numbers of shape \(2,\), got shape \(3,\)$"
    ):
        doubly_robust(good, np.ones(2), np.ones(2), np.ones(3), 0.05)
