"""The report of an experiment as the API shows it, with what the outcomes of its arms prove."""

import math
import time
from collections.abc import Mapping

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.evidence.looks import ArmSummary, Look
from marl_ray.experiments.evidence.series import Series
from marl_ray.experiments.lifecycle import ExperimentRecord, RampPlan
from marl_ray.experiments.ramp_steps import decide_step
from marl_ray.experiments.statistics.intervals import NO_OUTCOME, Interval, verdict
from marl_ray.experiments.statistics.sequential import mean_interval
from marl_ray.json_types import JsonMapping, JsonObject
from marl_ray.serving.ramp_decisions.curve_cache import CurveRows
from marl_ray.serving.ramp_decisions.questions import (
    HARM,
    PROMOTION,
    ArmTest,
    QuestionRules,
    measures_without_missing,
    run_test,
    shown_outcome_of,
)
from marl_ray.serving.ramp_decisions.ramp_control import LookResults, Reporting

_NO_UNITS = ArmSummary(0, 0, NO_OUTCOME)


def describe(
    record: ExperimentRecord,
    config: ExperimentConfig,
    arms: Mapping[str, JsonMapping],
    results: LookResults,
    shadow: Mapping[str, Mapping[str, float]],
    now: float | None = None,
) -> dict[str, object]:
    """Return the JSON of one experiment; unknown values are `null`.

    `arms` has what is known of their bundles (`digest`, `lineage`), or nothing; `shadow` is the store's totals. With
    probability 1 - config.alpha all intervals of the differences hold together, at all looks.
    """
    plan = record.plan
    state = record.state
    look = results.look
    total = math.fsum(record.weights.values())
    outcomes = {arm: look.summary("outcome", arm) for arm in plan.weights}
    largest = max(outcome.variance for outcome in outcomes.values())
    decision = decide_step(record, results.evidence, time.time() if now is None else now)
    rows: JsonObject = {}
    for arm, outcome in outcomes.items():
        units = look.units.get(arm, _NO_UNITS)
        stored = record.config["arms"][arm]
        arm_facts = arms.get(arm, {})
        interval = mean_interval(outcome, largest, alpha=config.alpha, min_outcomes=config.min_outcomes)
        rows[arm] = {
            "bundle": stored.get("bundle") or stored.get("url"),
            "digest": arm_facts.get("digest", stored["digest"]),
            "lineage": arm_facts.get("lineage"),
            "propensity": record.weights[arm] / total,
            "rolled_back": arm in state.rolled_back,
            "exposures": units.exposures,
            "judged": units.judged,
            "in_window": units.exposures - units.judged,
            "outcomes": units.outcomes.n,
            "observations": outcome.n,
            "mean": _finite_or_none(outcome.mean),
            "variance": _finite_or_none(outcome.variance) if outcome.n > 1 else None,
            "interval": _bounds(interval),
        }
    for harm, promotion in zip(results.harm, results.promotion, strict=True):
        alpha = config.alpha / len(plan.treatments)
        difference = _difference(harm.arm, results.look, config, plan, alpha)
        rows[harm.arm] |= {
            "difference": _finite_or_none(difference.estimate),
            "difference_interval": _bounds(difference),
            "verdict": verdict(difference, harm.margin).value,
            "harm": _test(harm),
            "promotion": _test(promotion),
        }
    return {
        "name": record.name,
        "endpoint": config.served_as,
        "created": record.created,
        "status": state.status.value,
        "winner": state.winner,
        "strategy": config.strategy,
        "randomize": config.randomize,
        "stages": list(plan.stages),
        "stage": state.stage,
        "epoch": state.epoch,
        "control": plan.control,
        "decision": {"step": decision.step.value, "arm": decision.arm, "reason": decision.reason},
        "srm": {"p_value": results.srm.p_value, "alarm": results.srm.alarm},
        "reporting": [_reporting(reports) for reports in results.reporting],
        "warnings": [
            *results.warnings,
            *_setting_warnings(config),
            *_same_weights_warnings(record),
            *_missing_warnings(results),
        ],
        "guardrails": [_guardrail(rail) for rail in results.guardrails],
        "shadow": {arm: dict(totals) for arm, totals in shadow.items()},
        "config": config.model_dump(mode="json"),
        "arms": rows,
    }


def curves(series: Series, config: ExperimentConfig) -> CurveRows:
    """Return arm -> rows of time, observations, mean and its bounds (null while unknown), for `EvidenceStore.series`.

    Each arm's bounds hold at all times at once with probability 1 - config.alpha.
    """
    points_by_arm: CurveRows = {}
    for arm, moments in series.items():
        rows = points_by_arm.setdefault(arm, [])
        for at, moment_summary in moments:
            interval = mean_interval(
                moment_summary, moment_summary.variance, alpha=config.alpha, min_outcomes=config.min_outcomes
            )
            rows.append(
                [at, moment_summary.n, _finite_or_none(moment_summary.mean), *(_bounds(interval) or (None, None))]
            )
    return points_by_arm


def _setting_warnings(config: ExperimentConfig) -> list[str]:
    """Return one sentence for each setting that may mislead the tests."""
    if len(config.arms) < 2 or not config.unbounded:
        return []
    return [f"A rare large value can mislead the tests of {', '.join(config.unbounded)}: declare bounds or winsorize."]


def _same_weights_warnings(record: ExperimentRecord) -> list[str]:
    """Return one sentence for each group of arms that have the same weights, whatever their bundles are called."""
    groups: dict[str, list[str]] = {}
    for name, arm in record.config["arms"].items():
        if (weights := arm.get("weights_sha256")) is not None:
            groups.setdefault(weights, []).append(name)
    return [
        f"Arms {', '.join(arms)} have the same weights: they do not differ but by chance, and a rollback of one keeps the "
        "weights of all from later experiments."
        for arms in groups.values()
        if len(arms) > 1
    ]


def _missing_warnings(results: LookResults) -> list[str]:
    """Return one sentence for each metric that some judged sessions lack and for which these sessions do not count."""
    lines: dict[str, str] = {}
    for row in results.reporting:
        lacking = row.judged + row.control_judged - row.reported - row.control_reported
        if lacking:
            lines.setdefault(
                row.metric,
                f"{lacking:,} of {row.judged + row.control_judged:,} judged sessions of {row.arm!r} and the control report "
                f"no {row.metric!r} and do not count: no test sees it if the arms lack different ones in equal numbers; "
                "`missing: VALUE` counts all.",
            )
    return list(lines.values())


def _difference(arm: str, look: Look, config: ExperimentConfig, plan: RampPlan, alpha: float) -> Interval:
    """Return the bounds of treatment - control by the tests that decide, each at half of alpha."""
    measure = shown_outcome_of(config)
    missing = "outcome" in measures_without_missing(config)
    rules: QuestionRules = {"alpha": alpha / 2, "min_outcomes": config.min_outcomes, "excludes_missing": missing}
    below, above = (run_test(side, look, measure, arm, plan, **rules) for side in (PROMOTION, HARM))
    is_bounded = measure.range is not None and min(below.treatment.n, below.control.n) >= config.min_outcomes
    max_difference = measure.range[1] - measure.range[0] if is_bounded and measure.range is not None else math.inf
    return Interval(below.test.gain, max(below.test.bound, -max_difference), min(above.test.bound, max_difference))


def _test(result: ArmTest) -> dict[str, object]:
    gain, bound, e_value, proven = result.test
    return {
        "margin": result.margin,
        "alpha": result.alpha,
        "gain": _finite_or_none(gain),
        "bound": _finite_or_none(bound),
        "e_value": e_value,
        "proven": proven,
    }


def _reporting(reporting: Reporting) -> dict[str, object]:
    return {
        "metric": reporting.metric,
        "arm": reporting.arm,
        "reported": reporting.reported,
        "judged": reporting.judged,
        "control_reported": reporting.control_reported,
        "control_judged": reporting.control_judged,
        "p_value": reporting.test.p_value,
        "alarm": reporting.test.alarm,
    }


def _guardrail(result: ArmTest) -> dict[str, object]:
    return {
        "name": result.name,
        "arm": result.arm,
        "better": result.better,
        "n": result.treatment.n,
        "control_n": result.control.n,
        "mean": _finite_or_none(result.treatment.mean),
        "control_mean": _finite_or_none(result.control.mean),
        **_test(result),
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _bounds(interval: Interval) -> list[float] | None:
    return [interval.low, interval.high] if math.isfinite(interval.high - interval.low) else None
