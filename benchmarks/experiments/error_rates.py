"""Errors of the experiment engine's tests when they are watched all the time, and the units until they find harm.

    .venv/bin/python -m benchmarks.experiments.error_rates                 about a quarter of an hour on one core
    .venv/bin/python -m benchmarks.experiments.error_rates --runs 1000     a quick look; stores nothing

Writes `benchmarks/results/experiments.{json,md,png}`.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before NumPy starts its threads: all numbers are of one core.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
from scipy.special import betaincinv, log_ndtr, stdtr

from benchmarks.experiments.bounds import simulate_bounded_outcomes
from benchmarks.experiments.bounds import table as bounded_table
from benchmarks.experiments.missing import MISSING, missing_delays, missing_errors, missing_table
from benchmarks.experiments.streams import (
    CHUNK,
    HORIZON,
    SCENARIOS,
    STEP,
    WRONG,
    Looks,
    Scenario,
    chunks,
    gaussian,
    two_arms,
)
from benchmarks.records import RESULTS, load_before, machine, store
from marl_ray.experiments.assignment.rendezvous import AssignmentTable
from marl_ray.experiments.assignment.sample_ratio import sample_ratio
from marl_ray.experiments.designs.fixed_size import samples_needed
from marl_ray.experiments.evidence.looks import Look
from marl_ray.experiments.lifecycle import RampPlan
from marl_ray.experiments.statistics.intervals import TIGHTEST_AT, Summary, tune_rho
from marl_ray.experiments.statistics.sequential import BORROWED_WEIGHT, PROMOTION_CAUTION
from marl_ray.serving.ramp_decisions.questions import Measure, run_test

ALPHA, FIRST = 0.05, 50
"""Error of each test, and `min_outcomes`."""
EFFECTS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)
"""True harms, in standard deviations."""
PROMOTION = "promotion of an equal arm"


class Errors(NamedTuple):
    """One scenario: shares of experiments in which any look erred."""

    name: str
    false_rollbacks: float
    false_promotions: float
    peeked: float
    """One-sided Welch test at the same level, peeked at, as a rollback."""


def variances(looks: Looks, margin: float, sign: int, binary: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of treatment and control, as `sequential` takes them."""
    n_t, n_c, mean_t, mean_c, var_t, var_c = looks
    if binary:
        pooled = (n_c * mean_c + n_t * (mean_t + margin)) / (n_t + n_c)
        null_t, null_c = np.clip(pooled - margin, 0, 1), np.clip(pooled, 0, 1)
        return (
            np.maximum(null_t * (1 - null_t), mean_t * (1 - mean_t)),
            np.maximum(null_c * (1 - null_c), mean_c * (1 - mean_c)),
        )
    larger, caution = np.maximum(var_t, var_c), PROMOTION_CAUTION if sign > 0 else 0

    def mixed(n: np.ndarray, var: np.ndarray) -> np.ndarray:
        borrowed: np.ndarray = (n * var + BORROWED_WEIGHT * larger) / (n + BORROWED_WEIGHT) + caution * larger / n
        return borrowed

    return mixed(n_t, var_t), mixed(n_c, var_c)


def log_evidence(
    looks: Looks, margin: float, sign: int, binary: bool = False, alpha: float = ALPHA, *, plain: bool = False
) -> np.ndarray:
    """Return ln E of `judge_harm` (sign -1) or `judge_promotion` (sign 1) at every look.

    It is -inf before the first allowed look. Where all outcomes are 0 or 1, the test of such is run too, unless it is
    to be `plain`.
    """
    evidence = _log_evidence(looks, margin, sign, binary, alpha)
    if binary or plain or looks.mean_c.min() < 0 or looks.mean_c.max() > 1:
        return evidence
    known = [(n - 1) * var - n * mean * (1 - mean) for n, mean, var in (looks[::2], looks[1::2])]
    means = (looks.n_t * looks.mean_t + looks.n_c * looks.mean_c) / np.maximum(looks.n_t + looks.n_c, 1)
    both = (np.abs(known[0]) < 1e-6) & (np.abs(known[1]) < 1e-6) & (means > 0) & (means < 1)
    return np.where(both, np.minimum(evidence, _log_evidence(looks, margin, sign, True, alpha)), evidence)


def _log_evidence(looks: Looks, margin: float, sign: int, binary: bool, alpha: float) -> np.ndarray:
    n_t, n_c, mean_t, mean_c, *_ = looks
    with np.errstate(invalid="ignore", divide="ignore"):
        s_t, s_c = variances(looks, margin, sign, binary)
        squared = s_t / n_t + s_c / n_c
        v, rho = 2 * (s_t + s_c) / squared, tune_rho(2 * TIGHTEST_AT * FIRST, 2 * alpha)
        x = sign * (mean_t - mean_c + margin) * np.sqrt(v / squared / (v + rho))
        evidence = math.log(2) + 0.5 * np.log(rho / (v + rho)) + x**2 / 2 + log_ndtr(x)
    known = (np.minimum(n_t, n_c) >= FIRST) & np.isfinite(evidence)
    return np.where(known, evidence, -np.inf)


def check(looks: Looks, margin: float, binary: bool) -> None:
    """Check that the vectorised formula is what the gateway's own test finds, at a few looks."""
    n_t, n_c, *parts = (np.broadcast_to(part, looks.mean_t.shape) for part in looks)
    measure, plan = Measure("outcome", "higher", margin, binary, None, None), RampPlan("c", {"c": 1.0, "t": 1.0})
    for sign in (-1, 1):
        evidence = log_evidence(looks, margin, sign, binary)
        for at in ((0, -1), (1, 60), (2, 20)):
            mean_t, mean_c, var_t, var_c = (float(part[at]) for part in parts)
            arms = {"t": Summary(int(n_t[at]), mean_t, var_t), "c": Summary(int(n_c[at]), mean_c, var_c)}
            look = Look({"outcome": arms}, {"outcome": {1: arms}})
            test = run_test(sign, look, measure, "t", plan, alpha=ALPHA, min_outcomes=FIRST).test
            if np.isfinite(evidence[at]):
                log_e = math.log(test.e_value)
                # Far below 0 both are approximations.
                assert math.isclose(log_e, evidence[at], rel_tol=1e-6 if log_e > 0 else 1e-2, abs_tol=1e-6), at
                assert test.proven == (evidence[at] > -math.log(ALPHA)), at


def welch_p_values(looks: Looks) -> np.ndarray:
    """Return one-sided Welch p-values of "treatment is worse", at every allowed look; 1 before."""
    n_t, n_c, mean_t, mean_c, var_t, var_c = looks
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = var_t / n_t, var_c / n_c
        squared = parts[0] + parts[1]
        dof = squared**2 / (parts[0] ** 2 / (n_t - 1) + parts[1] ** 2 / (n_c - 1))
        p = stdtr(dof, (mean_t - mean_c) / np.sqrt(squared))
    return np.where((np.minimum(n_t, n_c) >= FIRST) & np.isfinite(p), p, 1.0)


def error_rates(name: str, scenario: Scenario, runs: int, seed: int) -> Errors:
    """Simulate rollback under no difference and margin 0, and promotion under a loss of exactly the margin."""
    same, at_margin, margin, binary = scenario
    limit = -math.log(ALPHA)
    rollbacks, promotions, peeked = [], [], []
    for k, looks in enumerate(chunks(same, runs, seed)):
        if not k:
            check(looks, 0.0, binary)
        rollbacks.append((log_evidence(looks, 0.0, -1, binary) > limit).any(1))
        peeked.append((welch_p_values(looks) < ALPHA).any(1))
        if at_margin is None:
            lower = looks._replace(mean_t=looks.mean_t - margin)
            promotions.append((log_evidence(lower, margin, 1, binary) > limit).any(1))
    if at_margin is not None:
        for looks in chunks(at_margin, runs, seed + 1000):
            promotions.append((log_evidence(looks, margin, 1, binary) > limit).any(1))
    return Errors(name, *(float(np.concatenate(errors).mean()) for errors in (rollbacks, promotions, peeked)))


def first_look(proven: np.ndarray) -> np.ndarray:
    """Return (runs,): outcomes per arm at the first look that found something; infinite if none did."""
    return np.where(proven.any(1), (proven.argmax(1) + 1.0) * STEP, np.inf)


def delays(effect: float, runs: int, seed: int) -> dict[str, Any]:
    """Simulate harms of `effect` deviations and return the outcomes per arm until one is found.

    They are a median, a 90th percentile and the share that is found in time.
    """
    by_test: dict[str, list[np.ndarray]] = {
        "harm test": [],
        "Welch peeked at": [],
        PROMOTION: [],
    }
    for k in range(runs // CHUNK):
        rng = np.random.default_rng([seed, k])
        looks = two_arms(lambda rng, size: gaussian(rng, size) - effect, gaussian)(rng, CHUNK)
        by_test["harm test"].append(first_look(log_evidence(looks, 0.0, -1) > -math.log(ALPHA)))
        by_test["Welch peeked at"].append(first_look(welch_p_values(looks) < ALPHA))
        equal = looks._replace(mean_t=looks.mean_t + effect)
        by_test[PROMOTION].append(first_look(log_evidence(equal, effect, 1) > -math.log(ALPHA)))
    delay_of: dict[str, Any] = {}
    for name, parts in by_test.items():
        times = np.concatenate(parts)
        # Not interpolated: infinity is a possible value.
        middle, late = np.quantile(times, [0.5, 0.9], method="inverted_cdf")
        delay_of[name] = {
            "median": finite(middle),
            "p90": finite(late),
            "found": float(np.isfinite(times).mean()),
        }
    # A one-sided test at alpha needs what the two-sided one needs at 2 alpha.
    delay_of["fixed"] = {
        f"power {p}": samples_needed(effect=effect, sd=1, alpha=2 * ALPHA, power=p)[0] for p in (0.5, 0.9)
    }
    return delay_of


def finite(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def watch_assignment_tables(keys: int) -> dict[str, Any]:
    """Watch the shares of a table over many units, at every thousandth, and of a table that loses 2 % of one arm."""
    weights = {"control": 0.7, "first": 0.2, "second": 0.1}
    assignment, counts, lossy = (
        AssignmentTable(weights, "benchmark", 1),
        dict.fromkeys(weights, 0),
        dict.fromkeys(weights, 0),
    )
    rng = np.random.default_rng(5)
    lost = rng.random(keys) < 0.02
    smallest, caught = 1.0, None
    for k in range(keys):
        arm = assignment.assign(f"unit-{k}").arm
        counts[arm] += 1
        lossy[arm] += not (arm == "first" and lost[k])
        if (k + 1) % 1000 == 0:
            smallest = min(smallest, sample_ratio(counts, weights).p_value)
            if caught is None and sample_ratio(lossy, weights).alarm:
                caught = k + 1
    return {"keys": keys, "counts": counts, "smallest_p": smallest, "loss_of_2_percent_found_at": caught}


def srm_errors(runs: int, seed: int) -> float:
    """Return the share of fair runs of 20,000 units whose p-value ever falls to 0.05, with a look every 100."""
    weights = {"a": 0.9, "b": 0.1}
    rng, alarms = np.random.default_rng(seed), 0
    for _ in range(runs):
        b = rng.binomial(100, 0.1, 200).cumsum()
        alarms += any(
            sample_ratio({"a": 100 * (k + 1) - int(n), "b": int(n)}, weights).p_value <= 0.05 for k, n in enumerate(b)
        )
    return alarms / runs


def rate(share: float, runs: int) -> str:
    """Return a share in per cent, with its exact 95 % interval (Clopper, Pearson 1934)."""
    hits = round(share * runs)
    low = betaincinv(hits, runs - hits + 1, 0.025) if hits else 0.0
    high = betaincinv(hits + 1, runs - hits, 0.975) if hits < runs else 1.0
    return f"{100 * share:.2f} [{100 * low:.2f}, {100 * high:.2f}]"


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    runs = result["runs"]
    lines = [
        "# Experiments: errors and delays of the tests",
        "",
        f"{runs:,} simulated experiments per row, {HORIZON:,} outcomes per arm, a look after every {STEP} per arm from",
        f"{FIRST} on (canary: 1,000 and 9,000, a look after every 10 and 90; traffic and ramp: every 20 units; switchback:",
        f"{HORIZON:,} blocks in all, every 20). Each test may err with probability {ALPHA} over all looks together.",
        "Per cent, with 95 % intervals.",
        "",
        "- False rollback: `judge_harm` with margin 0 fires although both arms have the same mean (A/A).",
        "- False promotion: `judge_promotion` fires although the treatment is worse by exactly the margin (0.1; Bernoulli",
        "  0.5: 0.05; other Bernoulli: 0.02 unless named).",
        "- Peeked at: a one-sided Welch t-test at the same level, looked at as often, in the A/A experiments.",
        "",
        "| outcomes | false rollbacks % | false promotions % | Welch peeked at % |",
        "|---|---|---|---|",
    ]
    for row in result["errors"]:
        cells = (rate(row[key], runs) for key in ("false_rollbacks", "false_promotions", "peeked"))
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    lines += missing_table(result["missing"], result["missing_delays"], lambda share: rate(share, runs))
    lines += [
        "",
        "## Delay until harm is found",
        "",
        f"Gaussian outcomes, treatment worse by so many standard deviations, margin 0, {runs:,} experiments",
        "per row. Outcomes per arm: median / 90th percentile (found within the horizon). The fixed horizon is what a",
        "single look needs for a chance of 50 % / 90 %; it must be chosen before, knowing the effect. Peeked at it is",
        "faster, because it also fires without any harm (last column of the first table).",
        "",
        f"Last column: {PROMOTION}, the effect being the margin.",
        "",
        "| effect | harm test | fixed horizon, one look | Welch peeked at | promotion |",
        "|---|---|---|---|---|",
    ]
    for effect, row in result["delays"].items():
        tests = [
            f"{row[name]['median'] or 'never'} / {row[name]['p90'] or 'never'} ({100 * row[name]['found']:.0f} %)"
            for name in ("harm test", "Welch peeked at", PROMOTION)
        ]
        fixed = " / ".join(str(n) for n in row["fixed"].values())
        lines.append(f"| {effect} | {tests[0]} | {fixed} | {tests[1]} | {tests[2]} |")
    lines += ["", *bounded_table(result["bounded"], rate), "## Sample ratios", ""]
    srm = result["srm"]
    lines += [
        f"- Sample ratio test at 0.05 on fair shares: ever alarmed {rate(srm['alarms'], srm['runs'])} % of {srm['runs']:,}.",
        f"- {srm['keys']:,} units through `AssignmentTable` (0.7, 0.2, 0.1), a look at every thousandth: smallest p-value"
        f" {srm['smallest_p']:.3f}; if 2 % of one arm's units are lost, alarm at 0.001 after"
        f" {srm['loss_of_2_percent_found_at'] or math.nan:,} units.",
        "",
        f"Took {result['seconds']:.0f} s on one core. ![delays](experiments.png)",
    ]
    return "\n".join([*lines, ""])


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8))
    effects = [float(effect) for effect in result["delays"]]
    for name, style in (("harm test", "C0o-"), ("Welch peeked at", "C3x--")):
        medians = [row[name]["median"] or math.nan for row in result["delays"].values()]
        late = [row[name]["p90"] or math.nan for row in result["delays"].values()]
        left.plot(effects, medians, style, label=f"{name}, median")
        left.plot(effects, late, style[:2] + ":", alpha=0.5, label=f"{name}, 90 %")
    fixed = [row["fixed"]["power 0.9"] for row in result["delays"].values()]
    left.plot(effects, fixed, "k-.", label="fixed horizon, power 90 %")
    left.axhline(HORIZON, color="grey", lw=0.5)
    left.set(xscale="log", yscale="log", xlabel="harm, standard deviations", ylabel="outcomes per arm until found")
    left.set_xticks(effects, [str(effect) for effect in effects])
    left.minorticks_off()
    left.legend(fontsize=7)
    rows = result["errors"][::-1]
    at = np.arange(len(rows))
    for k, (key, label) in enumerate((("false_rollbacks", "false rollback"), ("false_promotions", "false promotion"))):
        right.barh(at + 0.2 - 0.4 * k, [100 * row[key] for row in rows], 0.38, label=label)
    right.axvline(100 * ALPHA, color="red", lw=1, label="alpha")
    right.set(yticks=at, xlabel="% of experiments, watched all the time", xscale="log")
    right.set_yticklabels([row["name"].replace("`", "") for row in rows], fontsize=7)
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Simulate, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10_000, help=f"experiments per scenario, a multiple of {CHUNK}")
    parser.add_argument("--only", default="", help="scenarios whose name contains this; errors only, nothing stored")
    options = parser.parse_args()
    load, started, runs, errors = load_before(), time.perf_counter(), options.runs, []
    for seed, (name, scenario) in enumerate((SCENARIOS | WRONG).items()):
        if options.only in name:
            before = time.perf_counter()
            errors.append(error_rates(name, scenario, runs, seed)._asdict())
            print(f"{time.perf_counter() - before:5.1f} s  {errors[-1]}", flush=True)
    missing = []
    for seed, (name, case) in enumerate(MISSING.items()):
        if options.only in name:
            missing.append(missing_errors(name, case, runs, 9_000 + seed, log_evidence, ALPHA)._asdict())
            print(missing[-1], flush=True)
    if options.only:
        return
    result = {
        "machine": machine("numpy", "scipy"),
        "load_before": load,
        "alpha": ALPHA,
        "min_outcomes": FIRST,
        "runs": runs,
        "errors": errors,
        "missing": missing,
        "missing_delays": missing_delays(runs, 3_000, log_evidence, ALPHA),
        "delays": {str(effect): delays(effect, runs, 2_000 + k) for k, effect in enumerate(EFFECTS)},
        "bounded": simulate_bounded_outcomes(runs, ALPHA, log_evidence),
        "srm": watch_assignment_tables(100 * runs) | {"runs": runs, "alarms": srm_errors(runs, 4_000)},
    }
    result["seconds"] = time.perf_counter() - started
    if runs < 10_000:
        print(table(result))
        return
    store("experiments", result, table(result))
    plot(result, RESULTS / "experiments.png")


if __name__ == "__main__":
    main()
