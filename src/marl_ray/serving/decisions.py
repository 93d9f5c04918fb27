"""From what the store knows to what is done with an experiment: the statistics asked, the decision taken, and written.

Every replica may decide. A decision names the epoch it was made on, so of several replicas one is heard; and harm needs no
majority: the first replica to see the proof rolls the arm back.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from marl_ray.config import ArmConfig, ExperimentConfig, parse_config
from marl_ray.config.experiment import GuardrailConfig
from marl_ray.experiments.looks import Look
from marl_ray.experiments.reporting import ALARM, Unequal, allowance, unequal_reporting
from marl_ray.experiments.sequential import OneSided, harm, promotion
from marl_ray.experiments.srm import Mismatch, sample_ratio_of_epochs
from marl_ray.experiments.states import (
    Action,
    ArmEvidence,
    Decision,
    Evidence,
    ExperimentRecord,
    StaleEpochError,
    Status,
    Step,
    advance,
)
from marl_ray.experiments.statistics import Summary
from marl_ray.experiments.store import ExperimentStore

ACTOR = "gateway"
ACTIONS = {Step.NEXT_STAGE: Action.NEXT_STAGE, Step.PROMOTE: Action.PROMOTE, Step.ROLLBACK: Action.ROLLBACK}

ERRORS = GuardrailConfig(name="error", better="lower", margin=0.01, alpha=0.01)
"""The guardrail of every experiment: of a hundred sessions a treatment may fail one more than the control does. A guardrail
`error` of the experiment's own takes its place."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test says of one treatment now."""

    name: str
    """`outcome` or a guardrail's."""
    arm: str
    better: str
    """`higher` or `lower`."""
    margin: float
    alpha: float
    """The treatment's part of it."""
    treatment: Summary
    control: Summary
    """Observations: of units, clusters or blocks."""
    test: OneSided
    """Holds whichever units are missing in one arm only."""
    allowance: float = 0.0
    """How far the means may be off by these, which the test has allowed for."""


@dataclass(frozen=True, slots=True)
class Reporting:
    """How many units of a treatment and of the control report a metric, of those whose windows are over."""

    metric: str
    """`outcome` or a guardrail's."""
    arm: str
    reported: int
    judged: int
    control_reported: int
    control_judged: int
    test: Unequal

    def sentence(self, control: str) -> str:
        """The alarm in words."""
        of_arm, of_control = (
            f"{arm!r} reports {self.metric!r} of {reported} of {judged} sessions"
            for arm, reported, judged in (
                (self.arm, self.reported, self.judged),
                (control, self.control_reported, self.control_judged),
            )
        )
        return f"{of_arm}, {of_control}: what is missing may decide, so nothing does"


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was asked in one look."""

    look: Look
    harm: tuple[Finding, ...]
    """Of the outcome, by treatment."""
    guardrails: tuple[Finding, ...]
    """By treatment, then in the config's order."""
    promotion: tuple[Finding, ...]
    srm: Mismatch
    reporting: tuple[Reporting, ...]
    """Of what does not count where it is missing, by metric, then treatment."""
    evidence: Evidence

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why nothing is promoted although the outcomes may prove it, in sentences."""
        arms = self.evidence.arms.values()
        return tuple(told for arm in arms for told in (arm.unequal, arm.unguarded) if told is not None)


def config_of(record: ExperimentRecord) -> ExperimentConfig:
    """The config that the store keeps, without what was added to it. MarlRayError if this version does not know it."""
    known, of_arm = ExperimentConfig.model_fields, ArmConfig.model_fields
    arms = {arm: {k: v for k, v in part.items() if k in of_arm} for arm, part in record.config["arms"].items()}
    data = {key: value for key, value in record.config.items() if key in known}
    whole = data | {"name": record.name, "arms": arms}
    return parse_config(ExperimentConfig, whole, source=f"experiment {record.name!r}")


def guardrails_of(config: ExperimentConfig) -> tuple[GuardrailConfig, ...]:
    """The experiment's own guardrails, and that on `error`."""
    own = config.guardrails
    return own if any(rail.name == ERRORS.name for rail in own) else (*own, ERRORS)


def find(look: Look, record: ExperimentRecord, config: ExperimentConfig) -> Findings:
    """What outcomes, guardrails and counts prove. Alphas are shared by the treatments (Bonferroni)."""
    plan, excluding = record.plan, _excluding(config)

    def ask(test: Callable[..., OneSided], name: str, better: str, margin: float, alpha: float, binary: bool) -> Any:
        def of_arm(arm: str) -> Finding:
            treatment, control = look.pair(name, arm, plan.control, len(plan.weights))
            share = alpha / len(plan.treatments)
            asked = {"alpha": share, "margin": margin, "min_outcomes": config.min_outcomes}
            exact = binary and all(_may_be_binary(look.summary(name, one)) for one in (arm, plan.control))
            allowed = 0.0
            if name in excluding:
                reports = look.reporting.pair(name, arm, plan.control, len(plan.weights))
                allowed = allowance(treatment, control, *reports)
            against = allowed if test is harm else -allowed
            moved = treatment.mean + (against if better == "higher" else -against)
            moved = min(max(moved, 0.0), 1.0) if exact and treatment.n else moved
            found = test(
                *(replace(treatment, mean=moved), control), **asked, higher_is_better=better == "higher", binary=exact
            )
            found = found._replace(gain=found.gain + abs(treatment.mean - moved) * (-1 if test is harm else 1))
            return Finding(name, arm, better, margin, share, treatment, control, found, allowed)

        return tuple(of_arm(arm) for arm in plan.treatments)

    harms = ask(harm, "outcome", "higher", config.margin, config.alpha_rollback, False)
    promotions = ask(promotion, "outcome", "higher", config.margin, config.alpha, False)
    rails = []
    for rail in guardrails_of(config):
        # The mean of a cluster is not 0 or 1.
        binary = rail.is_binary and config.randomize == "session"
        rails.append(ask(harm, rail.name, rail.better, rail.margin, rail.alpha, binary))
    guardrails = tuple(found for of_arm in zip(*rails, strict=True) for found in of_arm)
    reporting = tuple(_reporting(look, record, config, metric) for metric in excluding)
    told = tuple(found for of_metric in reporting for found in of_metric)
    exposures = _of_stage(look, record)
    arms = {plan.control: ArmEvidence(exposures.get(plan.control, 0))}
    for asked, bound in zip(harms, promotions, strict=True):
        alarms = {found.metric: found for found in told if found.arm == asked.arm and found.test.alarm}
        mine = [found for found in guardrails if found.arm == asked.arm]
        proof = next((found.name for found in (asked, *mine) if found.test.proven and found.name not in alarms), None)
        tested = min(asked.treatment.n, asked.control.n) >= config.min_outcomes
        arms[asked.arm] = ArmEvidence(
            exposures.get(asked.arm, 0),
            harm=proof,
            tested=tested,
            promotable=bound.test.proven,
            estimate=bound.test.gain,
            unequal=next((found.sentence(plan.control) for found in alarms.values()), None),
            unguarded=next(
                (lack for rail in mine if tested and (lack := _lack(look, plan.control, config, rail))), None
            ),
        )
    srm = sample_ratio_of_epochs((look.assigned.get(epoch, {}), shares) for epoch, shares in look.shares.items())
    return Findings(look, harms, guardrails, promotions, srm, told, Evidence(arms, srm.alarm))


def _excluding(config: ExperimentConfig) -> list[str]:
    """What units without it do not count in."""
    rails = [rail.name for rail in config.guardrails if rail.name != "outcome" and rail.counts_missing_as is None]
    return ["outcome", *rails] if config.missing == "exclude" else rails


def _reporting(look: Look, record: ExperimentRecord, config: ExperimentConfig, metric: str) -> list[Reporting]:
    """How often each treatment's units report the metric, against the control's; the alarm's level is shared by them."""
    plan, counts = record.plan, look.reported.get(metric, {})

    def of(arm: str) -> tuple[int, int]:
        return counts.get(arm, 0), look.units[arm].judged if arm in look.units else 0

    found = []
    for arm in plan.treatments:
        pair = look.reporting.pair(metric, arm, plan.control, len(plan.weights))
        level, units = ALARM / len(plan.treatments), config.randomize == "session"
        test = unequal_reporting(*pair, min_outcomes=config.min_outcomes, units=units, alpha=level)
        found.append(Reporting(metric, arm, *of(arm), *of(plan.control), test))
    return found


def _lack(look: Look, control: str, config: ExperimentConfig, rail: Finding) -> str | None:
    """Why a guardrail cannot speak of the arm, in a sentence; None if it can."""
    if rail.name != "error" and rail.name not in look.reported:  # errors are the gateway's own to note
        return f"no client has sent {rail.name!r} of a session, which a guardrail asks for"
    for arm, found in ((rail.arm, rail.treatment), (control, rail.control)):
        if found.n < config.min_outcomes:
            return f"the guardrail {rail.name!r} has {found.n} of {config.min_outcomes} observations of arm {arm!r}"
    return None


def _may_be_binary(found: Summary) -> bool:
    """Whether all values may be 0 or 1: numbers between them vary no more than these would, numbers beyond do."""
    # A client that counts its errors must not get a test whose variance is too small, nor stop all tests.
    largest = found.n * found.mean * (1 - found.mean)
    return not found.n or (0 <= found.mean <= 1 and found.variance * (found.n - 1) <= largest * (1 + 1e-6) + 1e-12)


def _of_stage(look: Look, record: ExperimentRecord) -> dict[str, int]:
    """Arm -> units that met it since the stage began: those assigned in its epochs, whenever they were written."""
    counts: dict[str, int] = {}
    for epoch, by_arm in look.exposed.items():
        for arm, n in by_arm.items() if epoch >= record.state.stage_epoch else ():
            counts[arm] = counts.get(arm, 0) + n
    return counts


def findings(store: ExperimentStore, record: ExperimentRecord, config: ExperimentConfig) -> Findings:
    """`find` on what the store knows now."""
    return find(store.look(record), record, config)


def decide(store: ExperimentStore, config: ExperimentConfig) -> Decision | None:
    """Look once, and do what the look calls for. None for an experiment that is over or unknown.

    An experiment that promotes by hand keeps running when its promotion bound holds.
    """
    record = store.experiment(config.name)
    if record is None or record.state.status not in (Status.RUNNING, Status.PAUSED, Status.PROMOTED):
        return None
    decision = advance(record, findings(store, record, config).evidence, time.time())
    action = ACTIONS.get(decision.step)
    if action is None or (action is Action.PROMOTE and not config.promotes):
        return decision
    try:
        store.change(config.name, action, epoch=decision.epoch, actor=ACTOR, reason=decision.reason, arm=decision.arm)
    except StaleEpochError:
        return None  # another replica was faster, or a person
    _log.warning("experiment %s: %s %s: %s", config.name, action, decision.arm or "", decision.reason)
    return decision
