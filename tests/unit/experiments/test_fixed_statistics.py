"""Textbook tests, adjustments, bandit weights and off-policy values, against oracles and plain loops."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from marl_ray.errors import MarlRayError
from marl_ray.experiments.designs.adjustment import adjust_holm, cuped, ratio_summary, summarise
from marl_ray.experiments.designs.fixed_size import power_of_test, samples_needed, welch
from marl_ray.experiments.designs.thompson import probability_best, thompson_weights
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.off_policy import PolicyValue, doubly_robust, exposure_gate, snips

ARMS = st.builds(Summary, st.integers(2, 500), st.floats(-3, 3), st.floats(0.01, 9))


@pytest.mark.parametrize(("n", "m"), [(2, 3), (20, 200), (500, 40)])
def test_welch_is_scipys(n, m):
    rng = np.random.default_rng(n)
    treatment, control = rng.normal(1.2, 3, n), rng.normal(1, 1, m)
    interval, oracle = (
        welch(summarise(treatment), summarise(control), 0.1),
        stats.ttest_ind(treatment, control, equal_var=False),
    )
    bounds = oracle.confidence_interval(0.9)
    assert (interval.p_value, interval.dof) == pytest.approx((oracle.pvalue, oracle.df))
    assert (interval.difference.low, interval.difference.high) == pytest.approx((bounds.low, bounds.high))
    assert interval.percent.estimate == pytest.approx(100 * (treatment.mean() - control.mean()) / control.mean())


@given(ARMS, ARMS, st.floats(0.01, 100))
def test_welch_scales_and_swaps(treatment, control, scale):
    def scaled(arm: Summary) -> Summary:
        return Summary(arm.n, scale * arm.mean, scale**2 * arm.variance)

    result, other = welch(treatment, control, 0.05), welch(scaled(treatment), scaled(control), 0.05)
    assert other.p_value == pytest.approx(result.p_value, rel=1e-6)
    assert other.difference.high == pytest.approx(scale * result.difference.high, rel=1e-6, abs=1e-9)
    swapped = welch(control, treatment, 0.05)
    assert swapped.p_value == pytest.approx(result.p_value)
    assert swapped.difference.low == pytest.approx(-result.difference.high)


def test_percent_change_covers_the_true_one():
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        treatment, control = rng.normal(6, 2, 80), rng.normal(5, 2, 120)
        percent = welch(summarise(treatment), summarise(control), 0.1).percent
        covered += percent.low < 20 < percent.high
    assert abs(covered / 400 - 0.9) < 3 * math.sqrt(0.09 / 400)
    assert math.isnan(welch(Summary(9, 1.0, 1.0), Summary(9, 0.0, 1.0), 0.1).percent.estimate)


def test_welch_knows_nothing_from_too_little():
    for arm in (Summary(0, math.nan, 0.0), Summary(1, 3.0, 0.0)):
        test = welch(arm, Summary(50, 1.0, 1.0), 0.05)
        assert (test.p_value, test.difference.high) == (1, math.inf)
    assert welch(Summary(9, 1.0, 0.0), Summary(9, 0.0, 0.0), 0.05).p_value == 1


def test_power_is_the_textbooks_and_the_simulations():
    # Cohen's table for two groups, alpha 0.05 two-sided, power 0.8.
    assert [samples_needed(effect=d, sd=1)[0] for d in (0.2, 0.5, 0.8)] == [394, 64, 26]
    rng = np.random.default_rng(0)
    p = stats.ttest_ind(rng.normal(0.5, 1, (20_000, 40)), rng.normal(0, 1, (20_000, 30)), axis=1).pvalue
    assert power_of_test(40, 30, effect=0.5, sd=1, alpha=0.05) == pytest.approx((p < 0.05).mean(), abs=0.011)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 3.0])
def test_samples_needed_are_the_fewest_that_have_the_power(ratio):
    treatment, control = samples_needed(effect=-2, sd=6, alpha=0.01, power=0.9, ratio=ratio)
    assert treatment == math.ceil(ratio * control)
    assert power_of_test(treatment, control, effect=-2, sd=6, alpha=0.01) >= 0.9
    fewer = math.ceil(ratio * (control - 1))
    assert power_of_test(fewer, control - 1, effect=-2, sd=6, alpha=0.01) < 0.9
    with pytest.raises(MarlRayError, match="effect: expected"):
        samples_needed(effect=0, sd=1)


def test_cuped_is_least_squares_with_a_mean_per_arm():
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(5, 2, 300), "b": rng.normal(5, 2, 200), "empty": np.zeros(0)}
    y = {"a": 3 * x["a"] + rng.normal(0, 2, 300), "b": 1 + 3 * x["b"] + rng.normal(0, 2, 200), "empty": np.zeros(0)}
    result = cuped(y, x)
    design = np.zeros((500, 3))
    design[:300, 0] = design[300:, 1] = 1
    design[:, 2] = np.concatenate([x["a"], x["b"]])
    intercept_a, intercept_b, slope = np.linalg.lstsq(design, np.concatenate([y["a"], y["b"]]), rcond=None)[0]
    assert result.theta == pytest.approx(slope)
    assert result.arms["b"].mean - result.arms["a"].mean == pytest.approx(intercept_b - intercept_a)
    assert result.arms["empty"].n == 0
    correlation = np.corrcoef(x["a"], y["a"])[0, 1]
    assert result.arms["a"].variance == pytest.approx((1 - correlation**2) * y["a"].var(ddof=1), rel=0.02)
    moved = cuped(y, {arm: 7 + 2 * values for arm, values in x.items()})
    assert moved.arms["a"].mean == pytest.approx(result.arms["a"].mean)
    constant = cuped(y, {arm: np.ones(len(values)) for arm, values in y.items()})
    assert constant.arms["a"] == summarise(y["a"])
    with pytest.raises(MarlRayError, match="arm 'b'"):
        cuped(y, {"a": x["a"]})


def test_ratio_varies_as_the_bootstrap_says():
    rng = np.random.default_rng(0)
    steps = rng.poisson(20, 500) + 1.0
    errors = rng.binomial(steps.astype(int), rng.beta(2, 18, 500)).astype(float)
    summary = ratio_summary(errors, steps)
    assert summary.mean == pytest.approx(errors.sum() / steps.sum())
    draws = rng.integers(0, 500, (4000, 500))
    bootstrap = (errors[draws].sum(1) / steps[draws].sum(1)).std()
    assert math.sqrt(summary.variance / summary.n) == pytest.approx(bootstrap, rel=0.05)
    plain, same = ratio_summary(errors, np.ones(500)), summarise(errors)
    assert (plain.mean, plain.variance) == pytest.approx((same.mean, same.variance))
    with pytest.raises(MarlRayError, match="denominators: expected a positive sum"):
        ratio_summary(np.ones(2), np.zeros(2))
    assert ratio_summary(np.zeros(0), np.zeros(0)).n == 0


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=6))
def test_holm_is_the_closure_of_bonferroni(p_values):
    """A hypothesis is refuted if every set of hypotheses that holds it is refuted by Bonferroni's test."""
    adjusted = adjust_holm(p_values)
    assert list(adjusted) == list(p_values)
    for name in p_values:
        sets = [s for size in range(1, len(p_values) + 1) for s in itertools.combinations(p_values, size) if name in s]
        assert adjusted[name] == pytest.approx(max(min(1, len(s) * min(p_values[k] for k in s)) for s in sets))


@given(ARMS, ARMS)
def test_two_arms_chances_have_a_closed_form(first, other):
    chances = probability_best({"one": first, "other": other})
    total = first.n + other.n
    pooled = (first.n * first.mean + other.n * other.mean) / total
    means = [(arm.n * arm.mean + pooled) / (arm.n + 1) for arm in (first, other)]
    error = math.sqrt(sum(arm.variance / (arm.n + 1) for arm in (first, other)))
    assert chances["one"] == pytest.approx(stats.norm.cdf((means[0] - means[1]) / error), abs=1e-4)
    assert chances["one"] + chances["other"] == pytest.approx(1)


def test_chances_of_many_arms_are_the_simulations_whatever_their_order():
    arms = {
        "a": Summary(400, 1.0, 4.0),
        "b": Summary(20_000, 1.05, 0.01),
        "c": Summary(30, 1.2, 1.0),
        "d": Summary(0, math.nan, 0.0),
    }
    chances, rng, n = probability_best(arms), np.random.default_rng(0), 400_000
    total = sum(arm.n for arm in arms.values())
    pooled = sum(arm.n * arm.mean for arm in arms.values() if arm.n) / total
    squares = sum((arm.n - 1) * arm.variance + arm.n * (arm.mean - pooled) ** 2 for arm in arms.values() if arm.n)
    draws = []
    for arm in arms.values():
        mean = (arm.n * arm.mean + pooled) / (arm.n + 1) if arm.n else pooled
        draws.append(rng.normal(mean, math.sqrt((arm.variance or squares / (total - 1)) / (arm.n + 1)), n))
    best = np.argmax(draws, axis=0)
    assert list(chances.values()) == pytest.approx([(best == k).mean() for k in range(4)], abs=0.004)
    turned = probability_best(dict(reversed(arms.items())))
    assert [turned[arm] for arm in arms] == pytest.approx(list(chances.values()))
    negated = {name: Summary(arm.n, -arm.mean, arm.variance) for name, arm in arms.items()}
    assert list(probability_best(negated, higher_is_better=False).values()) == pytest.approx(list(chances.values()))


@given(st.dictionaries(st.text(max_size=2), ARMS, min_size=1, max_size=5), st.floats(0, 1))
def test_weights_sum_to_one_above_the_floor(arms, share):
    floor = share / len(arms)
    weights = thompson_weights(arms, floor)
    assert math.fsum(weights.values()) == pytest.approx(1)
    assert min(weights.values()) >= floor - 1e-12


def test_weights_without_evidence_are_even():
    nothing = Summary(0, math.nan, 0.0)
    assert thompson_weights({"a": nothing, "b": nothing}, 0.1) == {"a": 0.5, "b": 0.5}
    assert thompson_weights({"a": Summary(5, 1.0, 0.0), "b": Summary(9, 1.0, 0.0)}, 0.1)["a"] == 0.5
    clear = thompson_weights({"a": Summary(500, 1.0, 1.0), "b": Summary(500, 0.0, 1.0)}, 0.05)
    assert clear["a"] == pytest.approx(0.95)
    with pytest.raises(MarlRayError, match="floor: expected 0 to 1/2"):
        thompson_weights({"a": nothing, "b": nothing}, 0.6)
    with pytest.raises(MarlRayError, match="arms"):
        probability_best({})


def logged(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
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
        weights, rewards, model, target_model, truth = logged(300, seed)
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
    weights, rewards, _, _, truth = logged(20_000, 1)
    assert doubly_robust(weights, rewards, np.zeros(20_000), np.zeros(20_000), 0.1).estimate == pytest.approx(
        truth, abs=0.05
    )


def test_snips_is_the_loop_and_moves_with_the_rewards():
    weights, rewards, *_ = logged(50, 0)
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
    with pytest.raises(MarlRayError, match="rewards: expected"):
        snips(good, np.ones(3), 0.05)
    with pytest.raises(MarlRayError, match="target_model: expected"):
        doubly_robust(good, np.ones(2), np.ones(2), np.ones(3), 0.05)
