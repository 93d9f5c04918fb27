"""`marl-ray experiment plan` and `analyse`: they read the experiment store and write a report."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from marl_ray.config import ExperimentConfig
from marl_ray.errors import FieldError, MarlRayError, did_you_mean
from marl_ray.experiments.designs.analysis import (
    IMBALANCE_LEVEL,
    Comparison,
    adjust_for_number,
    compare_arms,
    covariate_imbalance,
)
from marl_ray.experiments.designs.fixed_size import WelchTest, welch
from marl_ray.experiments.evidence.looks import Look
from marl_ray.experiments.lifecycle import ExperimentRecord
from marl_ray.experiments.statistics.intervals import Interval
from marl_ray.experiments.store.evidence import EvidenceStore
from marl_ray.experiments.store.facade import Stores, open_stores
from marl_ray.serving.ramp_decisions.questions import (
    ENDS,
    HARM,
    PROMOTION,
    QuestionRules,
    bounded_difference,
    measures_without_missing,
    run_test,
)
from marl_ray.serving.ramp_decisions.ramp_control import config_of

DAY_S = 86_400.0
"""Seconds of the last day, in which the sessions per day are counted."""


@dataclass(frozen=True, slots=True)
class PlanningNumbers:
    """The numbers that an experiment gives for planning the next one like it."""

    effect: float | None = None
    """The accepted loss, in units of the outcome; None if it is relative to a mean that is not known."""
    sd: float | None = None
    """Standard deviation of the control's outcomes; None of fewer than two."""
    alpha: float = 0.05
    """Error probability of each treatment's interval."""
    share: float = 0.5
    """The treatment's share of the units of both arms."""
    min_outcomes: int = 50
    """Outcomes that each arm needs before a verdict."""
    bounds: tuple[float, float] | None = None
    """[low, high] of the outcome; None if nothing bounds it."""
    per_day: float | None = None
    """Units of treatment and control together that have come in the last day."""


@contextmanager
def _open_experiment(database: str, name: str) -> Iterator[tuple[Stores, ExperimentRecord, ExperimentConfig]]:
    stores = open_stores(database, is_read_only=True)
    try:
        record = stores.experiments.read(name)
        if record is None:
            names = stores.experiments.names()
            instead = did_you_mean(name, names) if names else ", which has none"
            raise MarlRayError(f"experiment {name!r} is not in the database{instead}")
        yield stores, record, config_of(record)
    finally:
        stores.close()


def read_planning_numbers(database: str, name: str) -> PlanningNumbers:
    """Read the planning numbers of a stored experiment.

    The numbers are the control's, and those of the treatment with the least traffic. Raises MarlRayError if the
    experiment is unknown or assigns no sessions.
    """
    with _open_experiment(database, name) as (stores, record, config):
        _check_sessions(config, "plan")
        look = stores.evidence.look(record)
        plan = record.plan
        control = look.summary("outcome", plan.control)
        shares = {arm: weight for arm, weight in record.weights.items() if weight > 0}
        least = min((arm for arm in plan.treatments if arm in shares), key=lambda arm: shares[arm], default=None)
        share = 0.5
        if least is not None and plan.control in shares:
            share = shares[least] / (shares[least] + shares[plan.control])
        margin = config.margin
        relative = None
        if not isinstance(margin, float) and control.n:
            relative = margin.relative * control.mean
        moment = stores.database.settled_at()
        since = max(moment - DAY_S, record.created)
        arrivals_by_arm = stores.evidence.arrivals(name, since)
        arrivals = arrivals_by_arm.get(plan.control, 0) + (arrivals_by_arm.get(least, 0) if least else 0)
        return PlanningNumbers(
            effect=margin if isinstance(margin, float) else relative,
            sd=math.sqrt(control.variance) if control.n > 1 and control.variance > 0 else None,
            alpha=config.alpha / max(1, len(plan.treatments)),
            share=share,
            min_outcomes=config.min_outcomes,
            bounds=config.range_of("outcome"),
            per_day=arrivals * DAY_S / (moment - since) if moment > since else None,
        )


@dataclass(frozen=True)
class ExperimentAnalysis:
    """The comparisons of an experiment's treatments with its control."""

    experiment: str
    status: str
    epoch: int
    level: float
    """Level of the two-sided tests."""
    units: str
    """The kind of the units that are compared: sessions, clusters or blocks."""
    control: str
    covariate: str | None
    notes: list[str]
    """Sentences about what does not count, and about covariates that differ between arms."""
    comparisons: list[Comparison]

    def lines(self) -> list[str]:
        """Return the analysis for people."""
        title = f"{self.experiment}: {self.status}, epoch {self.epoch}"
        head = f"{title}, two-sided at level {self.level:g}, of {self.units} whose windows are over"
        rows = [
            line
            for row in self.comparisons
            for line in _comparison_lines(row, self.control, self.level, self.covariate)
        ]
        return [head, *(f"  {note}" for note in self.notes), *rows]


def analyse(
    database: str, name: str, covariate: str | None, more: Sequence[str], alpha: float | None
) -> ExperimentAnalysis:
    """Analyse a stored experiment.

    Raises FieldError if `alpha` is no level, and MarlRayError for an experiment that has nothing to compare.
    """
    with _open_experiment(database, name) as (stores, record, config):
        level = config.alpha if alpha is None else alpha
        if not 0 < level < 1:
            raise FieldError("alpha", f"expected a number above 0 and below 1, got {level:g}")
        metrics = list(dict.fromkeys(["outcome", *(rail.name for rail in config.guardrails), *more]))
        plan = record.plan
        if not plan.treatments:
            raise MarlRayError(f"experiment {name!r}: has one arm alone, and nothing to compare it with")
        notes = list[str]()
        if config.randomize != "session":
            if covariate is not None or any("/" in metric for metric in more):
                _check_sessions(config, "covariate and ratios")
            look = stores.evidence.look(record)
            rows = _compare_observations(look, record, metrics, level)
            judged = sum(units.judged for units in look.units.values())
            for metric in measures_without_missing(config):
                notes += _missing_notes(metric, judged - sum(look.reported.get(metric, {}).values()), judged, config)
            observation_kind = {"cluster": "clusters", "switchback": "blocks"}[config.randomize]
        else:
            parts = [part for metric in metrics for part in metric.split("/")]
            names = dict.fromkeys([*parts, *([covariate] if covariate else [])])
            units = stores.evidence.judged_units(record, list(names))
            ranges = {m: bounds for m in names if (bounds := config.range_of(m)) is not None}
            units = replace(
                units, values={m: np.clip(v, *ranges[m]) if m in ranges else v for m, v in units.values.items()}
            )
            reported_metrics = [m for m in metrics if m in more or "/" in m or not np.isnan(units.values[m]).all()]
            notes += [f"{metric}: no judged session has it" for metric in metrics if metric not in reported_metrics]
            for metric in reported_metrics:
                # A ratio's parts have lines of their own if they are asked for.
                values = units.values.get(metric, np.empty(0))
                notes += _missing_notes(metric, int(np.isnan(values).sum()), len(values), config)
            rows = compare_arms(units, reported_metrics, plan.treatments, plan.control, level, covariate)
            rows = _add_exact_bounds(stores.evidence, record, config, rows, level)
            if covariate is not None:
                for arm, p in covariate_imbalance(units, covariate, plan.treatments, plan.control).items():
                    if p < IMBALANCE_LEVEL:
                        notes.append(
                            f"warning: {arm} differs from the control in {covariate} (p {p:.2g}): it is not from before"
                        )
            observation_kind = "sessions"
        at = record.state
        return ExperimentAnalysis(
            name, at.status, record.epoch, level, observation_kind, plan.control, covariate, notes, rows
        )


def _check_sessions(config: ExperimentConfig, where: str) -> None:
    if config.randomize != "session":
        raise MarlRayError(
            f"{where}: expected an experiment that assigns sessions, this one assigns by {config.randomize}"
        )


def _compare_observations(
    look: Look, record: ExperimentRecord, metrics: Sequence[str], alpha: float
) -> list[Comparison]:
    plan = record.plan
    rows = []
    for metric in metrics:
        for arm in plan.treatments:
            pair = look.pair(metric, arm, plan.control, len(plan.weights))
            rows.append(Comparison(metric, arm, *pair, welch(*pair, alpha)))
    return adjust_for_number(rows)


def _add_exact_bounds(
    evidence: EvidenceStore, record: ExperimentRecord, config: ExperimentConfig, rows: list[Comparison], alpha: float
) -> list[Comparison]:
    """Return the lines with the exact bounds of the metrics that have a range."""
    plan = record.plan
    excluded = measures_without_missing(config)
    measures = {
        row.metric: bounded_difference(row.metric, metric_range)
        for row in rows
        if (metric_range := config.range_of(row.metric))
    }
    ends = {metric: (None, *ENDS) if metric in excluded else (None,) for metric in measures}
    questions = [
        measure.bet_question(side, arm, plan.control, end)
        for metric, measure in measures.items()
        for arm in plan.treatments
        for side in (PROMOTION, HARM)
        for end in ends[metric]
    ]
    if not questions:
        return rows
    look = evidence.look(record, questions=[question for question in questions if question is not None])

    def bound(row: Comparison) -> Comparison:
        if row.metric not in measures:
            return row
        rules: QuestionRules = {"alpha": alpha / 2, "min_outcomes": 2, "excludes_missing": row.metric in excluded}
        low, high = (
            run_test(side, look, measures[row.metric], row.arm, plan, **rules).test.bound for side in (PROMOTION, HARM)
        )
        return replace(row, always=Interval(row.test.difference.estimate, low, high))

    return [bound(row) for row in rows]


def _missing_notes(metric: str, lacking: int, judged: int, config: ExperimentConfig) -> list[str]:
    """Return a line if some sessions lack the metric, which then do not count."""
    if not 0 < lacking < judged:
        return []
    exact = config.randomize == "session" and config.range_of(metric) is not None
    sentence = (
        "the exact bounds allow for them, Welch's interval does not"
        if exact
        else "Welch's interval does not allow for them"
    )
    return [f"{metric}: {lacking:,} of {judged:,} sessions report none and do not count; {sentence}"]


def _comparison_lines(row: Comparison, control: str, alpha: float, covariate: str | None) -> list[str]:
    means = f"{row.treatment.mean:.4g} of {row.treatment.n:,} against {row.control.mean:.4g} of {row.control.n:,}"
    lines = [
        f"  {row.metric}: {row.arm} {means} ({control})",
        f"    Welch    {_test_text(row.test)}, {row.holm:.3g} by Holm",
    ]
    if row.adjusted is not None:
        lines.append(
            f"    CUPED    {_test_text(row.adjusted.test)}, {covariate} explains {row.adjusted.removed:.0%} of the variance"
        )
    if row.always is not None:
        low, high = (f"{end:+.4g}" if math.isfinite(end) else "-" for end in (row.always.low, row.always.high))
        lines.append(f"    exact    [{low}, {high}] at every look together")
    return lines


def _test_text(test: WelchTest) -> str:
    gap = test.difference
    percent = test.percent
    if not math.isfinite(gap.high):
        return "too few observations that differ"
    relative = f" ({percent.estimate:+.3g} %)" if math.isfinite(percent.estimate) else ""
    return f"{gap.estimate:+.4g}{relative} [{gap.low:+.4g}, {gap.high:+.4g}], p {test.p_value:.3g}"
