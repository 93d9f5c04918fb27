"""The control of ramps: a replica judges an experiment's evidence and writes its decision.

A replica asks the statistics what the store's numbers prove. Every replica may decide. A decision names the epoch on
which it was made, so the store accepts only the first of several replicas' decisions. Harm needs no majority: the first
replica to see the proof rolls the arm back.
"""

import contextlib
import logging
import math
import time
from dataclasses import dataclass

from marl_ray.config import ArmConfig, ExperimentConfig, parse_config
from marl_ray.config.serving.guardrails import GuardrailConfig
from marl_ray.experiments.assignment.sample_ratio import Mismatch, sample_ratio_of_epochs
from marl_ray.experiments.designs.thompson import thompson_weights
from marl_ray.experiments.evidence.looks import Look
from marl_ray.experiments.lifecycle import Action, ExperimentRecord, ExperimentStatus, StaleEpochError
from marl_ray.experiments.ramp_steps import ArmEvidence, RampDecision, RampEvidence, RampStep, decide_step
from marl_ray.experiments.statistics.missing_outcomes import ALARM_LEVEL, ReportingTest, judge_reporting
from marl_ray.experiments.store.evidence import EvidenceStore
from marl_ray.experiments.store.experiments import ExperimentStore
from marl_ray.experiments.store.rules import RolledBackElsewhereError
from marl_ray.serving.ramp_decisions.questions import (
    HARM,
    PROMOTION,
    ArmTest,
    Measure,
    QuestionRules,
    bet_questions_of,
    guardrail_of,
    measures_without_missing,
    outcome_of,
    run_test,
)
from marl_ray.serving.routing.unit_reports import ACTOR

ACTIONS = {
    RampStep.NEXT_STAGE: Action.NEXT_STAGE,
    RampStep.PROMOTE: Action.PROMOTE,
    RampStep.ROLLBACK: Action.ROLLBACK,
}

ERROR_GUARDRAIL = GuardrailConfig(name="error", better="lower", margin=0.01, alpha=0.01)
"""The guardrail of every experiment: a treatment may fail one more session in a hundred than the control. A guardrail
`error` in the experiment's config replaces it."""

SILENCE_REASON = "no client has sent an outcome of any session"
MIN_CHANGE = 0.01
"""Minimum change of a share that is worth a new epoch."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reporting:
    """Numbers of judged units of a treatment and of the control that report a metric."""

    metric: str
    """`outcome` or a guardrail's."""
    arm: str
    reported: int
    """Judged units of the treatment that report the metric."""
    judged: int
    """Judged units of the treatment."""
    control_reported: int
    """Judged units of the control that report the metric."""
    control_judged: int
    """Judged units of the control."""
    test: ReportingTest

    def sentence(self, control: str) -> str:
        """Return the alarm as a sentence."""
        of_arm, of_control = (
            f"{arm!r} reports {self.metric!r} of {reported} of {judged} sessions"
            for arm, reported, judged in (
                (self.arm, self.reported, self.judged),
                (control, self.control_reported, self.control_judged),
            )
        )
        return f"{of_arm}, {of_control}: what is missing may decide, so nothing does"


@dataclass(frozen=True, slots=True)
class LookResults:
    """All results of one look at an experiment."""

    look: Look
    harm: tuple[ArmTest, ...]
    """The tests of the outcome, by treatment."""
    guardrails: tuple[ArmTest, ...]
    """The tests of guardrails, by treatment, then in the config's order."""
    promotion: tuple[ArmTest, ...]
    srm: Mismatch
    reporting: tuple[Reporting, ...]
    """The reporting of each metric whose missing values do not count, by metric, then treatment."""
    evidence: RampEvidence

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences that say why nothing is promoted although the outcomes may prove a gain."""
        arms = self.evidence.arms.values()
        return tuple(
            warning for arm in arms for warning in (arm.unequal_reports, arm.guardrail_gap) if warning is not None
        )


def config_of(record: ExperimentRecord) -> ExperimentConfig:
    """Read the config that the store keeps, without the fields that the store adds.

    Raises MarlRayError if this version cannot read it.
    """
    arms = {
        name: {key: value for key, value in arm.items() if key in ArmConfig.model_fields}
        for name, arm in record.config["arms"].items()
    }
    data = {key: value for key, value in record.config.items() if key in ExperimentConfig.model_fields}
    complete = data | {"name": record.name, "arms": arms}
    return parse_config(ExperimentConfig, complete, source=f"experiment {record.name!r}")


def guardrails_of(config: ExperimentConfig) -> tuple[GuardrailConfig, ...]:
    """Return the experiment's own guardrails and the one on `error`."""
    configured = config.guardrails
    return (
        configured if any(rail.name == ERROR_GUARDRAIL.name for rail in configured) else (*configured, ERROR_GUARDRAIL)
    )


def judge_look(look: Look, record: ExperimentRecord, config: ExperimentConfig) -> LookResults:
    """Test outcomes, guardrails and counts. The treatments share each alpha (Bonferroni)."""
    plan = record.plan
    excluded = measures_without_missing(config)

    def test_all(side: int, measure: Measure, alpha: float) -> tuple[ArmTest, ...]:
        share = alpha / len(plan.treatments) if plan.treatments else alpha
        rules: QuestionRules = {
            "alpha": share,
            "min_outcomes": config.min_outcomes,
            "excludes_missing": measure.name in excluded,
        }
        return tuple(run_test(side, look, measure, arm, plan, **rules) for arm in plan.treatments)

    harms = test_all(HARM, outcome_of(config), config.alpha_rollback)
    promotions = test_all(PROMOTION, outcome_of(config), config.alpha)
    rails = [test_all(HARM, guardrail_of(config, rail), rail.alpha) for rail in guardrails_of(config)]
    guardrails = tuple(result for of_arm in zip(*rails, strict=True) for result in of_arm)
    reporting = tuple(_reporting(look, record, config, metric) for metric in excluded)
    reports = tuple(result for of_metric in reporting for result in of_metric)
    exposures = _stage_exposures(look, record)
    arms = {plan.control: ArmEvidence(exposures.get(plan.control, 0))}
    # If no report has a numeric value, reports and silence are the same and prove nothing about an arm.
    has_reports = any(look.reported.get("outcome", {}).values())
    for harm_test, promotion_test in zip(harms, promotions, strict=True):
        alarms = {result.metric: result for result in reports if result.arm == harm_test.arm and result.test.alarm}
        rails_of_arm = [result for result in guardrails if result.arm == harm_test.arm]
        proof = next(
            (result.name for result in (harm_test, *rails_of_arm) if result.test.proven and result.name not in alarms),
            None,
        )
        is_enough = min(harm_test.treatment.n, harm_test.control.n) >= config.min_outcomes
        reasons = (
            (_missing_evidence(look, plan.control, config, rail) for rail in rails_of_arm)
            if has_reports
            else [SILENCE_REASON]
        )
        arms[harm_test.arm] = ArmEvidence(
            exposures.get(harm_test.arm, 0),
            harm=proof,
            tested=is_enough and has_reports,
            promotable=promotion_test.test.proven and has_reports,
            estimate=promotion_test.test.gain,
            unequal_reports=next((result.sentence(plan.control) for result in alarms.values()), None),
            guardrail_gap=next((reason for reason in reasons if reason), None) if is_enough else None,
        )
    srm = sample_ratio_of_epochs((look.assigned.get(epoch, {}), shares) for epoch, shares in look.shares.items())
    return LookResults(look, harms, guardrails, promotions, srm, reports, RampEvidence(arms, srm.alarm, look.barred))


def _reporting(look: Look, record: ExperimentRecord, config: ExperimentConfig, metric: str) -> list[Reporting]:
    """Compare how often each treatment's units report the metric with how often the control's do.

    The treatments share the alarm's level.
    """
    plan = record.plan
    counts = look.reported.get(metric, {})

    def counts_of(arm: str) -> tuple[int, int]:
        return counts.get(arm, 0), look.units[arm].judged if arm in look.units else 0

    reports = []
    for arm in plan.treatments:
        pair = look.reporting.pair(metric, arm, plan.control, len(plan.weights))
        level = ALARM_LEVEL / len(plan.treatments)
        binary = config.randomize == "session"
        test = judge_reporting(*pair, min_outcomes=config.min_outcomes, binary=binary, alpha=level)
        reports.append(Reporting(metric, arm, *counts_of(arm), *counts_of(plan.control), test))
    return reports


def _missing_evidence(look: Look, control: str, config: ExperimentConfig, rail: ArmTest) -> str | None:
    """Return a sentence that says why a guardrail cannot judge the arm; None if it can."""
    if rail.name != "error" and rail.name not in look.reported:  # the gateway itself records errors
        return f"no client has sent {rail.name!r} of a session, which a guardrail asks for"
    for arm, summary in ((rail.arm, rail.treatment), (control, rail.control)):
        if summary.n < config.min_outcomes:
            return f"the guardrail {rail.name!r} has {summary.n} of {config.min_outcomes} observations of arm {arm!r}"
    return None


def _stage_exposures(look: Look, record: ExperimentRecord) -> dict[str, int]:
    """Return arm -> units exposed to it in the stage's epochs, whenever their exposures were written."""
    counts: dict[str, int] = {}
    for epoch, by_arm in look.exposed.items():
        for arm, n in by_arm.items() if epoch >= record.state.stage_epoch else ():
            counts[arm] = counts.get(arm, 0) + n
    return counts


def read_results(evidence: EvidenceStore, record: ExperimentRecord, config: ExperimentConfig) -> LookResults:
    """Run `judge_look` on the store's present numbers."""
    return judge_look(evidence.look(record, questions=bet_questions_of(config, record.plan)), record, config)


def decide(experiments: ExperimentStore, evidence: EvidenceStore, config: ExperimentConfig) -> RampDecision | None:
    """Look once at an experiment and write the decision that its evidence calls for.

    Returns None if the experiment has ended or is unknown. An experiment that promotes by hand keeps running when its
    promotion bound holds.
    """
    record = experiments.read(config.name)
    if record is None or record.state.status not in (
        ExperimentStatus.RUNNING,
        ExperimentStatus.PAUSED,
        ExperimentStatus.PROMOTED,
    ):
        return None
    results = read_results(evidence, record, config)
    now = time.time()
    decision = decide_step(record, results.evidence, now)
    action = ACTIONS.get(decision.step)
    if action is None or (action is Action.PROMOTE and not config.has_automatic_promotion):
        if config.strategy == "thompson":
            _reallocate(experiments, record, config, results, now)
        return decision
    try:
        experiments.change(
            config.name, action, epoch=decision.epoch, actor=ACTOR, reason=decision.reason, arm=decision.arm
        )
    except (StaleEpochError, RolledBackElsewhereError):
        return None  # another replica, a person or another experiment was first
    _log.warning("experiment %s: %s %s: %s", config.name, action, decision.arm or "", decision.reason)
    return decision


def _reallocate(
    experiments: ExperimentStore, record: ExperimentRecord, config: ExperimentConfig, results: LookResults, now: float
) -> None:
    """Set new weights if it is time and the evidence suffices.

    Every arm must have enough outcomes, and the arms' exposures and reports must match their shares.
    """
    state = record.state
    plan = record.plan
    since = state.stage_since if state.allocation is None else state.allocation.at
    remaining = [arm for arm in plan.weights if arm not in state.rolled_back]
    is_enough = all(results.look.summary("outcome", arm).n >= config.min_outcomes for arm in remaining)
    if (
        state.status is not ExperimentStatus.RUNNING
        or now - since < config.reweigh_s
        or len(remaining) < 2
        or not is_enough
    ):
        return
    if (
        results.look.barred is not None
        or results.srm.alarm
        or any(reporting.test.alarm for reporting in results.reporting)
    ):
        return
    drawn = thompson_weights(results.look.gains("outcome", plan.control, remaining, len(plan.weights)), config.floor)
    weights = {arm: drawn.get(arm, 0.0) for arm in plan.weights}
    total = math.fsum(record.weights.values())
    if max(abs(weights[arm] - record.weights[arm] / total) for arm in weights) < MIN_CHANGE:
        return
    shares = ", ".join(f"{arm} {share:.1%}" for arm, share in weights.items())
    with contextlib.suppress(StaleEpochError, RolledBackElsewhereError):  # somebody else was first
        experiments.reallocate(
            record.name, weights, epoch=record.epoch, actor=ACTOR, reason=f"chances to be best: {shares}"
        )
