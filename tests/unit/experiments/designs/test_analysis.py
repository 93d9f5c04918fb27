"""`marl-ray experiment plan` and `analyse`: what they compute, from arrays and from a database."""

import json
import math
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes.command_line import keys_of
from scipy import stats
from waiting import until

from marl_ray.cli import main
from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.experiments.assignment.rendezvous import AssignmentTable
from marl_ray.experiments.designs.analysis import Units, compare_arms, covariate_imbalance
from marl_ray.experiments.designs.planning import sample_sizes
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.sequential import judge_harm
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.reports import Report
from marl_ray.experiments.store.units import Exposure


def draw_units(n: int = 900, epochs: int = 1, seed: int = 0) -> Units:
    """Treatment `b` is better by 0.3; `skill` explains most of the outcome; outcomes and shares drift by epoch."""
    rng = np.random.default_rng(seed)
    epoch = np.repeat(np.arange(1, epochs + 1), n // epochs)
    treated = rng.random(n) < (0.5 if epochs == 1 else epoch / (epochs + 1))
    skill = rng.normal(size=n)
    outcome = 0.3 * treated + 1.5 * skill + rng.normal(size=n) - 2.0 * epoch
    steps = rng.poisson(20, n) + 1.0
    errors = rng.binomial(steps.astype(int), np.where(treated, 0.05, 0.1)).astype(float)
    values = {"outcome": outcome, "skill": skill, "steps": steps, "errors": errors, "nothing": np.full(n, math.nan)}
    return Units(np.where(treated, "b", "a"), epoch, values)


def test_of_one_epoch_it_is_welchs_test_and_cuped_is_sharper():
    units = draw_units()
    first, other = (units.values["outcome"][units.arms == arm] for arm in "ba")
    (row,) = compare_arms(units, ["outcome"], ["b"], "a", 0.1, "skill")
    oracle = stats.ttest_ind(first, other, equal_var=False)
    assert row.test.p_value == pytest.approx(oracle.pvalue)
    low, high = oracle.confidence_interval(0.9)
    assert (row.test.difference.low, row.test.difference.high) == (pytest.approx(low), pytest.approx(high))
    assert row.adjusted.removed == pytest.approx(0.69, abs=0.05)  # 1.5^2 of 1.5^2 + 1
    width = row.adjusted.test.difference.high - row.adjusted.test.difference.low
    assert width < 0.65 * (high - low)
    assert row.adjusted.test.difference.low < 0.3 < row.adjusted.test.difference.high
    assert covariate_imbalance(units, "skill", ["b"], "a")["b"] > 0.001


def test_epochs_are_compared_within_themselves():
    """The share of `b` rises while outcomes fall: pooled, the better arm looks worse."""
    units = draw_units(1_800, epochs=3)
    first, other = (units.values["outcome"][units.arms == arm] for arm in "ba")
    assert first.mean() < other.mean()
    (row,) = compare_arms(units, ["outcome"], ["b"], "a", 0.05, "skill")
    assert row.test.difference.low < 0.3 < row.test.difference.high
    assert row.adjusted.test.difference.low > 0


def test_a_covariate_that_units_lack_leaves_their_outcomes_alone():
    units = draw_units()
    partly = dict(units.values) | {"skill": np.where(np.arange(900) % 3 == 0, math.nan, units.values["skill"])}
    (row,) = compare_arms(Units(units.arms, units.epochs, partly), ["outcome"], ["b"], "a", 0.05, "skill")
    assert 0.25 < row.adjusted.removed < 0.6
    assert row.adjusted.test.difference.low < 0.3 < row.adjusted.test.difference.high


def test_ratios_and_holm_over_everything():
    rows = compare_arms(draw_units(), ["outcome", "errors/steps", "steps"], ["b"], "a", 0.05, None)
    ratio = next(row for row in rows if row.metric == "errors/steps")
    assert (ratio.treatment.mean, ratio.control.mean) == (pytest.approx(0.05, abs=0.01), pytest.approx(0.1, abs=0.01))
    assert ratio.test.p_value < 1e-6
    for row in rows:
        assert row.test.p_value <= row.holm <= min(1, 3 * row.test.p_value) or row.holm >= ratio.holm
    for metric, covariate in (("nothing", None), ("unknown", None), ("outcome", "unknown"), ("errors/unknown", None)):
        with pytest.raises(MarlRayError, match=r"metric: no judged unit has .*expected one of errors, outcome"):
            compare_arms(draw_units(), [metric], ["b"], "a", 0.05, covariate)


@pytest.mark.parametrize("effect", [0.3, 0.6])
def test_the_plan_is_what_the_test_that_decides_needs(effect):
    planned = sample_sizes(effect=effect, sd=2.0 * effect, alpha=0.05, power=0.8)
    assert planned.fixed == 126 + 2 or abs(planned.fixed - 2 * 64) <= 2  # Cohen's table for half a deviation
    rng, needed = np.random.default_rng(0), []
    for _ in range(150):
        a, b = rng.normal(size=400), rng.normal(size=400) - 0.5
        for n in range(50, 401, 10):
            arms = (Summary(n, float(x[:n].mean()), float(x[:n].var(ddof=1))) for x in (b, a))
            if judge_harm(*arms, alpha=0.05, margin=0.0, min_outcomes=50).proven:
                needed.append(2 * n)
                break
        else:
            needed.append(10**9)
    assert 0.7 * planned.median < np.median(needed) < 1.1 * planned.median
    assert np.mean(np.array(needed) <= planned.sure) >= 0.75


def test_plans_of_bounded_and_of_tiny_effects():
    wide, narrow = (sample_sizes(effect=0.3, sd=1, bounds=bounds) for bounds in ((-110, 10), (-5, 5)))
    assert narrow.median < wide.median / 5
    assert sample_sizes(effect=0.3, sd=1, share=0.01).median > 10 * sample_sizes(effect=0.3, sd=1).median
    assert sample_sizes(effect=1e-5, sd=1).sure is None
    for words, inputs in (
        ("share: expected a number above 0 and below 1, got 1", {"share": 1.0}),
        ("bounds: expected low < high at least two sd apart, got (0, 1) with sd 1", {"bounds": (0, 1)}),
        ("effect: expected a finite number of 1e-06 sd at least, got 0 with sd 1", {"effect": 0.0}),
        ("power: expected a number above alpha, 0.05, and below 1, got 0.01", {"power": 0.01}),
        ("alpha: expected a number from 1e-06 to below 0.5, got 0", {"alpha": 0.0}),
    ):
        with pytest.raises(FieldError) as caught:
            sample_sizes(**{"effect": 1.0, "sd": 1.0} | inputs)
        assert str(caught.value) == words


def test_an_epoch_in_which_nobody_has_any_of_the_denominator_is_left_out_of_a_ratio():
    units = draw_units(epochs=2)
    steps = np.where(units.epochs == 1, 4.0, 0.0)
    both = Units(units.arms, units.epochs, {"errors": np.abs(units.values["outcome"]), "steps": steps})
    first = units.epochs == 1
    alone = Units(units.arms[first], units.epochs[first], {name: column[first] for name, column in both.values.items()})
    rows = [compare_arms(table, ["errors/steps"], ["b"], "a", 0.05, None)[0] for table in (both, alone)]
    assert rows[0].test == rows[1].test


@pytest.mark.parametrize(
    "inputs",
    [
        {"effect": math.nan},
        {"sd": math.inf},
        {"effect": 1e300, "sd": 1e-300},
        {"effect": 1e-200},
        {"share": 1e-9},
        {"alpha": 1e-300},
        {"alpha": 0.6},
        {"sd": 0.5, "bounds": (0.0, math.inf)},
    ],
)
def test_numbers_that_nothing_can_be_planned_with_are_refused(inputs):
    with pytest.raises(MarlRayError, match="expected"):
        sample_sizes(**{"effect": 1.0, "sd": 1.0} | inputs)


def test_an_effect_of_many_deviations_needs_the_fewest_units():
    assert sample_sizes(effect=1e5, sd=1.0) == sample_sizes(effect=25.0, sd=1.0) == (4, 101, 101)


class Stored:
    """A database with one experiment of 600 sessions."""

    def __init__(self, folder: Path):
        self.url = f"sqlite:///{folder}/experiments.db"
        self.now = 1_700_000_000.0
        self.clock: Callable[[], float] | None = lambda: self.now

    def fill(self, silent: int = 0, **more: Any) -> None:
        """`silent`: every so many-th session of the treatment reports no outcome."""
        keys = {"name": "grid", "arms": {"ppo": {"bundle": "p"}, "mappo": {"bundle": "m"}}, "outcome_window_s": 10.0}
        config = parse_config(
            ExperimentConfig, keys | {"guardrails": [{"name": "cost"}, {"name": "speed", "better": "higher"}]} | more
        )
        stored = config.model_dump(mode="json") | {"salt": "s", "control": "ppo"}
        for arm in config.arms:
            stored["arms"][arm]["digest"] = f"digest-{arm}"
        stores = open_stores(self.url, self.clock)
        stores.experiments.open("grid", stored)
        table, rng, rows = (
            AssignmentTable(stores.experiments.assignment_state("grid").weights, "s", 1),
            np.random.default_rng(0),
            [],
        )
        for k in range(600):
            cluster = f"match{k % 60}" if config.randomize == "cluster" else None
            rows.append(Exposure("grid", f"u{k}", table.assign(cluster or f"u{k}"), self.now, cluster))
        stores.units.record_exposures(rows)
        reports = []
        for k, row in enumerate(rows):
            skill = rng.random()
            better = 0.2 * (row.assignment.arm == "mappo")
            values = {"outcome": 0.5 * skill + 0.3 * rng.random() + better, "cost": rng.random(), "skill": skill}
            if silent and k % silent == 0 and row.assignment.arm == "mappo":
                del values["outcome"]
            reports.append(Report(row.unit, values))
        stores.units.record("grid", reports)
        stores.close()


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["experiment", *words])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def test_analyse_tells_every_test(stored, capsys):
    stored.fill(bounds=[0, 1])
    status, out, _ = run(
        capsys, "analyse", "grid", "--database", stored.url, "--covariate", "skill", "--metric", "cost/skill"
    )
    assert status == 0
    assert out.startswith("grid: running, epoch 1, two-sided at level 0.05, of sessions whose windows are over\n")
    assert re.search(r"outcome: mappo 0\.\d+ of \d+ against 0\.\d+ of \d+ \(ppo\)", out)
    assert re.search(r"Welch    \+0\.\d+ \(\+\d+.*%\) \[\+0\.\d+, \+0\.\d+\], p \S+, \S+ by Holm", out)
    assert re.search(r"CUPED .*, skill explains \d+% of the variance", out)
    exact = re.search(r"exact    \[\+(0\.\d+), \+(0\.\d+)\] at every look together", out)
    assert exact and float(exact[1]) < 0.2 < float(exact[2])
    assert "speed: no judged session has it" in out and "cost/skill: mappo" in out
    assert "warning" not in out and "do not count" not in out
    status, out, _ = run(capsys, "analyse", "grid", "--database", stored.url, "--json")
    document = json.loads(out)
    assert status == 0 and set(document) == keys_of("experiment analyse")
    assert 0 < document["comparisons"][0]["test"]["difference"]["low"] < 0.2 and document["units"] == "sessions"


@pytest.mark.parametrize("randomize", ["session", "cluster"])
def test_analyse_says_what_is_missing_and_its_exact_bounds_allow_for_it(stored, capsys, randomize):
    stored.fill(silent=2, bounds=[0, 1], randomize=randomize)
    status, out, _ = run(capsys, "analyse", "grid", "--database", stored.url)
    silent = re.search(r"\n  outcome: 1\d\d of 600 sessions report none and do not count; (.*)\n", out)
    assert status == 0 and silent
    if randomize == "session":
        assert silent[1] == "the exact bounds allow for them, Welch's interval does not"
        low, high = re.search(r"exact    \[(\S+), (\S+)\]", out).groups()
        assert float(low) < 0 and float(high) > 0.2  # of those who report alone it is above 0
    else:
        assert silent[1] == "Welch's interval does not allow for them"


def test_analyse_warns_of_a_covariate_that_the_treatment_moves(stored, capsys):
    stored.fill()
    _, out, _ = run(capsys, "analyse", "grid", "--database", stored.url, "--covariate", "outcome")
    assert "warning: mappo differs from the control in outcome" in out and "exact" not in out


def test_analyse_of_clusters_counts_clusters(stored, capsys):
    stored.fill(randomize="cluster", bounds=[0, 1])
    status, out, _ = run(capsys, "analyse", "grid", "--database", stored.url)
    counts = [int(n) for n in re.findall(r"of (\d+)", out.splitlines()[1])]
    assert status == 0 and sum(counts) == 60 and "of clusters whose" in out
    status, _, err = run(capsys, "analyse", "grid", "--database", stored.url, "--covariate", "skill")
    assert status == 2 and "expected an experiment that assigns sessions" in err


def test_plan_takes_what_the_experiment_says(stored, capsys):
    stored.fill(margin=0.1)
    status, out, _ = run(capsys, "plan", "grid", "--database", stored.url)
    assert status == 0
    assert re.match(r"effect 0\.1, sd 0\.1\d+: units of treatment and control together\n", out)
    assert len(re.findall(r"\d\s*$", out, re.MULTILINE)) == 3 and "days" not in out  # nobody has come today
    status, out, _ = run(capsys, "plan", "--effect", "0.05", "--sd", "0.5", "--bounds", "0,1")
    assert status == 0 and "exact test at every look" in out and "3,142" in out


def test_plan_tells_days_by_the_traffic_of_the_last_day(tmp_path, capsys):
    stored = Stored(tmp_path)
    # The command reads the clock of the machine. Units and their outcomes come at one moment, just after the opening.
    stored.clock = cache(lambda: time.time() + 0.1)
    stored.fill(margin="20%", outcome_window_s=0.05)
    until(lambda: time.time() > stored.clock() + 0.1, "the end of the units' windows")
    status, out, _ = run(capsys, "plan", "grid", "--database", stored.url)
    assert status == 0 and len(re.findall(r"[\d,]+  0\.0 days$", out, re.MULTILINE)) == 3
    assert re.match(r"effect 0\.0\d+, sd", out)  # a fifth of the control's mean


def test_refusals_are_one_line(stored, tmp_path, capsys):
    stored.fill()
    missing = f"sqlite:///{tmp_path}/typo/experiments.db"
    unexpected = []
    for words, message in (
        (("plan",), "--effect: expected a number"),
        (("plan", "--effect", "1"), "--sd: expected a number"),
        (("plan", "--effect", "1", "--sd", "1", "--bounds", "1"), "--bounds: expected LOW,HIGH"),
        (("plan", "--effect", "1", "--sd", "-1"), "sd: expected"),
        (
            ("plan", "nobody", "--database", stored.url),
            "experiment 'nobody' is not in the database; expected one of grid",
        ),
        (("analyse", "grid", "--database", stored.url, "--alpha", "2"), "--alpha: expected"),
        (("analyse", "grid", "--database", stored.url, "--covariate", "luck"), "no judged unit has 'luck'"),
        (("analyse", "grid", "--database", "nonsense"), "database: expected"),
        (("analyse", "grid", "--database", missing), f"database {missing!r} is not there; a gateway makes its"),
        (("plan", "grid", "--database", missing), f"database {missing!r} is not there; a gateway makes its"),
    ):
        status, _, err = run(capsys, *words)
        if status != 2 or message not in err or err.count("\n") != 1:
            unexpected.append((words, status, err))
    assert unexpected == []
    assert not (tmp_path / "typo").exists()
