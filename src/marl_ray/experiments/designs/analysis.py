"""A textbook analysis of an experiment, done once at its end: every metric and every treatment.

Welch's test keeps its error rate for one look at a size that was fixed beforehand (`planning`). If somebody stops an
experiment because of this test's result, the result is no evidence; `sequential` and `bets` hold the tests for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marl_ray.errors import MarlRayError
from marl_ray.experiments.designs.adjustment import adjust_holm, cuped, ratio_summary, summarise
from marl_ray.experiments.designs.fixed_size import WelchTest, welch
from marl_ray.experiments.statistics.intervals import Interval, Summary
from marl_ray.experiments.statistics.unit_clusters import pool_strata

IMBALANCE_LEVEL = 0.001
"""P-value below which arms differ in a covariate by more than chance explains."""


@dataclass(frozen=True, slots=True)
class Units:
    """The judged units of an experiment, in order."""

    arms: np.ndarray
    """(n,) names of the units' arms."""
    epochs: np.ndarray
    """(n,) epochs in which the units were assigned."""
    values: Mapping[str, np.ndarray]
    """Metric (or `outcome`) -> (n,) values; NaN where a unit has none."""

    def summaries(self, values: np.ndarray, arm: str) -> dict[int, Summary]:
        """Return epoch -> summary of the arm's units that have a value."""
        return {int(e): summarise(values[self._has_value(values, arm, e)]) for e in np.unique(self.epochs)}

    def _has_value(self, values: np.ndarray, arm: str, epoch: int) -> np.ndarray:
        having: np.ndarray = (self.arms == arm) & (self.epochs == epoch) & ~np.isnan(values)
        return having


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The same comparison after CUPED."""

    test: WelchTest
    """The test of the adjusted outcomes."""
    removed: float
    """Part of the variance that the covariate explains, and that CUPED removes."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one treatment."""

    metric: str
    arm: str
    treatment: Summary
    control: Summary
    test: WelchTest
    holm: float = 1.0
    """P-value adjusted (Holm) for all comparisons of the analysis."""
    adjusted: Adjustment | None = None
    always: Interval | None = None
    """Bounds of the difference that hold at every look, where the metric has bounds."""


def compare_arms(
    units: Units, metrics: Sequence[str], treatments: Sequence[str], control: str, alpha: float, covariate: str | None
) -> list[Comparison]:
    """Compare each treatment with the control by two-sided Welch tests at level `alpha`, within epochs.

    A metric `A/B` is the sum of A over the sum of B (`adjustment.ratio_summary`). `covariate` names the metric that CUPED
    adjusts by, or is None. Raises MarlRayError for a metric or covariate that no unit has.
    """
    comparisons = []
    for metric in metrics:
        if "/" in metric:
            comparisons += [_compare_ratio(units, metric, arm, control, alpha) for arm in treatments]
            continue
        values = _values(units, metric)
        by_arm = {arm: units.summaries(values, arm) for arm in (*treatments, control)}
        residuals = None if covariate is None else _residuals(units, values, _values(units, covariate))
        for arm in treatments:
            treated, controls = pool_strata((by_arm[arm][e], by_arm[control][e]) for e in by_arm[arm])
            adjusted = None
            if residuals is not None:
                of_arm, of_control = units.summaries(residuals, arm), units.summaries(residuals, control)
                pair = pool_strata((of_arm[e], of_control[e]) for e in of_arm)
                before, after = treated.variance + controls.variance, pair[0].variance + pair[1].variance
                adjusted = Adjustment(welch(*pair, alpha), 1 - after / before if before > 0 else 0.0)
            comparisons.append(
                Comparison(metric, arm, treated, controls, welch(treated, controls, alpha), adjusted=adjusted)
            )
    return adjust_for_number(comparisons)


def adjust_for_number(rows: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons of one analysis, with their p-values adjusted (Holm) for all of them."""
    adjusted = adjust_holm({str(k): row.test.p_value for k, row in enumerate(rows)})
    return [replace(row, holm=adjusted[str(k)]) for k, row in enumerate(rows)]


def covariate_imbalance(units: Units, covariate: str, treatments: Sequence[str], control: str) -> dict[str, float]:
    """Return treatment -> p-value of its difference from the control in the covariate.

    A small one says that the treatment moved the covariate: then it is not from before the exposure, and CUPED is wrong.
    """
    rows = compare_arms(units, [covariate], treatments, control, 0.05, None)
    return {row.arm: row.test.p_value for row in rows}


def _values(units: Units, metric: str) -> np.ndarray:
    values = units.values.get(metric)
    if values is None or np.isnan(values).all():
        metrics = (
            ", ".join(sorted(name for name, column in units.values.items() if not np.isnan(column).all())) or "none yet"
        )
        raise MarlRayError(f"metric: no judged unit has {metric!r}; expected one of {metrics}")
    return values


def _residuals(units: Units, values: np.ndarray, covariate: np.ndarray) -> np.ndarray:
    """Return the values less what the covariate explains within epochs and arms.

    A unit without a covariate keeps its value.
    """
    both = ~np.isnan(values) & ~np.isnan(covariate)
    outcomes, covariates = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for epoch in np.unique(units.epochs):
        for arm in np.unique(units.arms):
            members = both & (units.epochs == epoch) & (units.arms == arm)
            outcomes[f"{epoch} {arm}"], covariates[f"{epoch} {arm}"] = values[members], covariate[members]
    centre = covariate[both].mean() if both.any() else 0.0
    gaps = np.where(np.isnan(covariate), 0.0, covariate - centre)
    return values - cuped(outcomes, covariates).theta * gaps


def _compare_ratio(units: Units, metric: str, arm: str, control: str, alpha: float) -> Comparison:
    above, _, below = metric.partition("/")
    top, bottom = _values(units, above), _values(units, below)
    both = ~np.isnan(top) & ~np.isnan(bottom)

    def ratio_of(name: str, epoch: int) -> Summary:
        members = both & (units.arms == name) & (units.epochs == epoch)
        if not bottom[members].any():
            # An epoch whose denominators are all 0 has no ratio.
            members[:] = False
        return ratio_summary(top[members], bottom[members])

    treated, controls = pool_strata((ratio_of(arm, int(e)), ratio_of(control, int(e))) for e in np.unique(units.epochs))
    return Comparison(metric, arm, treated, controls, welch(treated, controls, alpha))
