"""The decision about a ramp: the step that evidence calls for, as a pure function."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from marl_ray.experiments.lifecycle import ExperimentRecord, ExperimentStatus


class RampStep(StrEnum):
    """The action that one look at the evidence calls for."""

    HOLD = "hold"
    HOLD_SRM = "hold_srm"
    """The arms' counts contradict the weights, so no outcome can be trusted."""
    HOLD_REPORTING = "hold_reporting"
    """One arm's units report more or less often than the control's, so the missing outcomes could decide."""
    NEXT_STAGE = "next_stage"
    PROMOTE = "promote"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class ArmEvidence:
    """Evidence about one arm. Of the control's, only `exposures` is read."""

    exposures: int = 0
    """Units assigned to the arm since the stage began."""
    harm: str | None = None
    """Name of the metric that proved harm (`outcome` or a guardrail), or None.

    It is never a metric that the arm's units report more or less often than the control's.
    """
    tested: bool = True
    """True if the arm has enough outcomes for the harm test."""
    promotable: bool = False
    """True if the promotion bound holds."""
    estimate: float = 0.0
    """Estimated gain; the promotable arm with the largest one wins."""
    unequal_reports: str | None = None
    """A sentence that names the metric that the arm's units report more or less often than the control's, or None."""
    guardrail_gap: str | None = None
    """A sentence that names the guardrail with too few values for a test, or says that no outcome has come; else None."""


@dataclass(frozen=True, slots=True)
class RampEvidence:
    """Results of the statistics of one look, as plain values."""

    arms: Mapping[str, ArmEvidence] = field(default_factory=dict)
    srm_alarm: bool = False
    """True if the sample ratio test finds that the arms' counts contradict the weights."""
    barred: str | None = None
    """A sentence that says why no arm may get more traffic, or None."""


@dataclass(frozen=True, slots=True)
class RampDecision:
    """The next step of an experiment, with its reason."""

    step: RampStep
    epoch: int
    """The epoch whose evidence the decision rests on."""
    reason: str
    arm: str | None = None
    """The arm that is promoted or rolled back; None for other steps."""


def decide_step(record: ExperimentRecord, evidence: RampEvidence, now: float) -> RampDecision:
    """Decide the next step of the experiment at `now`, in seconds since 1970.

    Proven harm comes first and waits for nothing, not even for a clean traffic split. Then a suspicious split holds
    everything, as do reports that one arm's units lack, and weights that another experiment has rolled back. Only when
    the stage has had its exposures and its time does the next stage follow, or the promotion after the last stage.
    Missing evidence, that of guardrails included, never promotes an arm and never takes the control's last units.
    """
    plan, state = record.plan, record.state

    def hold(reason: str, step: RampStep = RampStep.HOLD) -> RampDecision:
        return RampDecision(step, state.epoch, reason)

    by_arm = {arm: evidence.arms.get(arm, ArmEvidence()) for arm in plan.weights}
    active = [arm for arm in plan.treatments if arm not in state.rolled_back]
    for arm in active:
        if by_arm[arm].harm is not None:
            return RampDecision(RampStep.ROLLBACK, state.epoch, f"harm proven by {by_arm[arm].harm}", arm)
    if state.status is not ExperimentStatus.RUNNING:
        return hold(f"the experiment is {state.status.replace('_', ' ')}")
    if evidence.srm_alarm:
        return hold("sample ratio mismatch", RampStep.HOLD_SRM)
    weighted = [arm for arm in active if record.weights[arm] > 0]
    for arm in weighted:
        if (unequal_reports := by_arm[arm].unequal_reports) is not None:
            return hold(unequal_reports, RampStep.HOLD_REPORTING)
    if evidence.barred is not None:
        return hold(evidence.barred)
    exposed = min((by_arm[arm].exposures for arm, weight in record.weights.items() if weight > 0), default=0)
    if exposed < plan.min_exposures:
        return hold(f"{exposed} of {plan.min_exposures} exposures in this stage")
    if now - state.stage_since < plan.min_duration_s:
        return hold(f"{now - state.stage_since:.0f} of {plan.min_duration_s:g} s in this stage")
    untested = [arm for arm in weighted if not by_arm[arm].tested]
    if untested:
        # That their harm is not proven means nothing yet.
        gap = next((gap for arm in untested if (gap := by_arm[arm].guardrail_gap)), None)
        return hold(gap or f"too few outcomes to test {', '.join(untested)} for harm")
    proven = [arm for arm in active if by_arm[arm].promotable]
    promotable = [arm for arm in proven if by_arm[arm].guardrail_gap is None]
    later_stages = plan.stages[state.stage + 1 :]
    # If the next stage gives the control nothing, the comparison cannot grow any more: the proof must come before it.
    if later_stages and (later_stages[0] < 1 or promotable):
        share = plan.stages[state.stage]
        return RampDecision(RampStep.NEXT_STAGE, state.epoch, f"no harm at {share:g} of the units")
    if not promotable:
        gap = by_arm[proven[0]].guardrail_gap if proven else None
        return hold(gap or "the promotion bound does not hold yet")
    best = max(promotable, key=lambda arm: by_arm[arm].estimate)
    return RampDecision(RampStep.PROMOTE, state.epoch, "the promotion bound holds", best)
