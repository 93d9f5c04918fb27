"""Units until the engine decides: a promotion where outcomes are missing, a rollback where an arm fails.

    .venv/bin/python -m benchmarks.experiments.delays

Every look is the gateway's own: its sums, its questions, its tests. Writes
`benchmarks/results/experiment_delays.{json,md}`; takes two minutes on one core.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.records import machine, store
from marl_ray.config import ExperimentConfig, parse_config
from marl_ray.experiments.evidence.looks import Look, look_at
from marl_ray.experiments.evidence.running_sums import LookSettings, Totals
from marl_ray.experiments.lifecycle import RampPlan
from marl_ray.experiments.statistics.intervals import Summary
from marl_ray.experiments.statistics.moments import Moments
from marl_ray.experiments.statistics.sequential import judge_harm, judge_promotion
from marl_ray.serving.ramp_decisions.questions import PROMOTION, Measure, QuestionRules, outcome_of, run_test
from marl_ray.serving.ramp_decisions.ramp_control import ERROR_GUARDRAIL

PLAN = RampPlan("c", {"c": 1.0, "t": 1.0})
CONFIG = parse_config(ExperimentConfig, {"name": "benchmark", "arms": {"c": {"bundle": "c"}, "t": {"bundle": "t"}}})
"""An experiment with the defaults of all keys that tests read."""
STEP, HORIZON = 50, 4_000
"""Units of an arm between looks, and in an experiment."""
TIMES = 1.3
"""The treatment's outcomes are so many times as large as the control's."""
SHARES = (1.0, 0.95)
"""Shares of both arms' units that report."""
FAILURES = (
    *((1.0, 0.0), (0.1, 0.0), (0.05, 0.0), (0.03, 0.0)),
    *((0.02, 0.01), (0.11, 0.1), (0.51, 0.5), (0.1, 0.1), (0.0, 0.0)),
)
"""Chances of a failure in treatment and control."""
SESSIONS = np.unique(np.geomspace(50, 5_000, 40).round().astype(int))
"""Sessions of an arm at each look of the guardrail on errors."""


class Arm(NamedTuple):
    """The units of an arm, in order."""

    values: np.ndarray
    """Outcomes (units,), NaN where a unit reports none."""

    def moments(self, units: int) -> Moments:
        """Return the moments of what the first units have reported."""
        values = self.values[:units]
        values = values[~np.isnan(values)]
        mean = float(values.mean())
        return Moments(len(values), mean, float(((values - mean) ** 2).sum()), float(values.min()), float(values.max()))

    def filled(self, units: int, value: float) -> Summary:
        """Return the summary of the first units, where those that report nothing have this value."""
        values = np.where(np.isnan(self.values[:units]), value, self.values[:units])
        return Summary(units, float(values.mean()), float(values.var(ddof=1)))


def draw_arms(rng: np.random.Generator, share: float) -> dict[str, Arm]:
    """Draw log-normal outcomes, of which this share is reported."""
    arms = {}
    for name, factor in (("c", 1.0), ("t", TIMES)):
        values = factor * np.exp(rng.standard_normal(HORIZON))
        values[rng.random(HORIZON) >= share] = np.nan
        arms[name] = Arm(values)
    return arms


def look(arms: dict[str, Arm], units: int) -> Look:
    """Return the gateway's look at the first units of each arm."""
    judged = {(1, name, "", True): units for name in arms}
    values = {("outcome", 1, name, "", True): arm.moments(units) for name, arm in arms.items()}
    return look_at(Totals({key[:3]: n for key, n in judged.items()}, judged, values), LookSettings(), 0.0)


def promotes(arms: dict[str, Arm], measure: Measure, units: int) -> bool:
    """Return True if the gateway promotes at this look."""
    rules = QuestionRules(alpha=CONFIG.alpha, min_outcomes=CONFIG.min_outcomes, excludes_missing=True)
    return run_test(PROMOTION, look(arms, units), measure, "t", PLAN, **rules).test.proven


def promotes_at_extremes(arms: dict[str, Arm], measure: Measure, units: int) -> bool:
    """Return True if a test promotes whose ends are the least and the largest outcome of all."""
    moments = [arm.moments(units) for arm in arms.values()]
    return all(
        judge_promotion(
            arms["t"].filled(units, value),
            arms["c"].filled(units, value),
            alpha=CONFIG.alpha,
            margin=measure.absolute,
            min_outcomes=CONFIG.min_outcomes,
        ).proven
        for value in (min(m.low for m in moments), max(m.high for m in moments))
    )


def first_units(looks: Iterator[int], decides: Callable[[int], bool]) -> float:
    """Return the units of an arm at the first look that decides; infinite if none does."""
    return next((float(units) for units in looks if decides(units)), math.inf)


def describe(times: list[float], factor: int) -> dict[str, Any]:
    """Return the share of experiments that were decided, and the median number of units, None if beyond the last look."""
    median = float(np.quantile(times, 0.5, method="inverted_cdf"))
    return {
        "decided": float(np.isfinite(times).mean()),
        "median": int(factor * median) if math.isfinite(median) else None,
    }


def promotions(runs: int) -> list[dict[str, Any]]:
    """Return for each share that reports how soon the gateway promotes, and a test with the extremes as ends."""
    measure, rows = outcome_of(CONFIG), []
    for share in SHARES:
        times: dict[str, list[float]] = {"gateway": [], "extremes": []}
        for run in range(runs):
            arms = draw_arms(np.random.default_rng([round(100 * share), run]), share)
            for name, decides in (("gateway", promotes), ("extremes", promotes_at_extremes)):
                looks = iter(range(STEP, HORIZON + 1, STEP))
                times[name].append(first_units(looks, partial(decides, arms, measure)))
        rows.append({"share": share} | {name: describe(values, 2) for name, values in times.items()})
        print(rows[-1], flush=True)
    return rows


def rollbacks(runs: int) -> list[dict[str, Any]]:
    """Return for each pair of failure rates how often and how soon the guardrail on errors rolls the treatment back."""
    rail, rows = ERROR_GUARDRAIL, []
    margin = rail.margin
    assert isinstance(margin, float)
    for number, chances in enumerate(FAILURES):
        times = []
        for run in range(runs):
            rng = np.random.default_rng([number, run])
            failed = [(rng.random(SESSIONS[-1]) < chance).cumsum() for chance in chances]

            def is_harm(n: int, failed: list[np.ndarray] = failed) -> bool:
                shares = [float(count[n - 1] / n) for count in failed]
                return judge_harm(
                    *(Summary(n, share, share * (1 - share)) for share in shares),
                    alpha=rail.alpha,
                    margin=margin,
                    min_outcomes=CONFIG.min_outcomes,
                    higher_is_better=False,
                    binary=True,
                ).proven

            times.append(first_units(map(int, SESSIONS), is_harm))
        rows.append({"treatment": chances[0], "control": chances[1]} | describe(times, 1))
        print(rows[-1], flush=True)
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    runs = result["runs"]
    lines = [
        "# Experiments: units until a decision",
        "",
        f"{runs:,} simulated experiments per row, with the defaults: margin {CONFIG.margin}, alpha {CONFIG.alpha}.",
        "",
        "## Promotion where outcomes are missing",
        "",
        f"Log-normal outcomes; the treatment's are {TIMES} times as large. A look every {2 * STEP} units of both arms, up",
        f"to {2 * HORIZON:,}. Units of both arms until the promotion: median (share of experiments that promote). The last",
        "column is a test whose two ends are the least and the largest outcome that was reported.",
        "",
        "| report | the gateway | the extremes as ends |",
        "|---|---|---|",
    ]
    for row in result["promotions"]:
        cells = (
            f"{row[name]['median'] or math.inf:,} ({100 * row[name]['decided']:.1f} %)"
            for name in ("gateway", "extremes")
        )
        lines.append(f"| {row['share']:.0%} | {' | '.join(cells)} |".replace("inf", "never"))
    lines += [
        "",
        "## Rollback where an arm fails",
        "",
        f"The guardrail on `error`, {len(SESSIONS)} looks between {SESSIONS[0]} and {SESSIONS[-1]:,} sessions per arm.",
        "",
        "| failures of treatment, control | rolled back | sessions per arm until then (median) |",
        "|---|---|---|",
    ]
    for row in result["rollbacks"]:
        median = f"{row['median']:,}" if row["median"] is not None else ""
        share = f"{100 * row['decided']:.1f} %"
        lines.append(f"| {100 * row['treatment']:g} %, {100 * row['control']:g} % | {share} | {median} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Simulate, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=1_000, help="experiments per row; fewer store nothing")
    runs = parser.parse_args().runs
    result = {
        "machine": machine("numpy"),
        "runs": runs,
        "promotions": promotions(runs),
        "rollbacks": rollbacks(runs),
    }
    if runs < 1_000:
        print(table(result))
        return
    store("experiment_delays", result, table(result))


if __name__ == "__main__":
    main()
