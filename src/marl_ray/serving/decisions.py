"""From what the store knows to what is done with an experiment: the statistics asked, the decision taken, and written.

Every replica may decide. A decision names the epoch it was made on, so of several replicas one is heard; and harm needs no
majority: the first replica to see the proof rolls the arm back.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any

from marl_ray.config import ArmConfig, ExperimentConfig, parse_config
from marl_ray.experiments.looks import Look
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
from marl_ray.experiments.store import ExperimentStore
from marl_ray.serving.asking import (
    HARM,
    PROMOTION,
    Finding,
    Measure,
    ask,
    guardrail_of,
    outcome_of,
    questions_of,
)

ACTOR = "gateway"
ACTIONS = {Step.NEXT_STAGE: Action.NEXT_STAGE, Step.PROMOTE: Action.PROMOTE, Step.ROLLBACK: Action.ROLLBACK}

_log = logging.getLogger(__name__)


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
    evidence: Evidence


def config_of(record: ExperimentRecord) -> ExperimentConfig:
    """The config that the store keeps, without what was added to it. MarlRayError if this version does not know it."""
    known, of_arm = ExperimentConfig.model_fields, ArmConfig.model_fields
    arms = {arm: {k: v for k, v in part.items() if k in of_arm} for arm, part in record.config["arms"].items()}
    data = {key: value for key, value in record.config.items() if key in known}
    whole = data | {"name": record.name, "arms": arms}
    return parse_config(ExperimentConfig, whole, source=f"experiment {record.name!r}")


def find(look: Look, record: ExperimentRecord, config: ExperimentConfig) -> Findings:
    """What outcomes, guardrails and counts prove. Alphas are shared by the treatments (Bonferroni)."""
    plan = record.plan

    def asked(side: int, measure: Measure, alpha: float) -> tuple[Finding, ...]:
        share = alpha / len(plan.treatments) if plan.treatments else alpha
        rules: Any = {"arms": len(plan.weights), "alpha": share, "min_outcomes": config.min_outcomes}
        return tuple(ask(side, look, measure, arm, plan.control, **rules) for arm in plan.treatments)

    harms = asked(HARM, outcome_of(config), config.alpha_rollback)
    promotions = asked(PROMOTION, outcome_of(config), config.alpha)
    rails = [asked(HARM, guardrail_of(config, rail), rail.alpha) for rail in config.guardrails]
    guardrails = tuple(found for of_arm in zip(*rails, strict=True) for found in of_arm)
    exposures = _of_stage(look, record)
    arms = {plan.control: ArmEvidence(exposures.get(plan.control, 0))}
    for harmed, bound in zip(harms, promotions, strict=True):
        mine = [harmed, *(found for found in guardrails if found.arm == harmed.arm)]
        proof = next((found.name for found in mine if found.test.proven), None)
        tested = min(harmed.treatment.n, harmed.control.n) >= config.min_outcomes
        arms[harmed.arm] = ArmEvidence(exposures.get(harmed.arm, 0), proof, tested, bound.test.proven, bound.test.gain)
    srm = sample_ratio_of_epochs((look.assigned.get(epoch, {}), shares) for epoch, shares in look.shares.items())
    return Findings(look, harms, guardrails, promotions, srm, Evidence(arms, srm.alarm))


def _of_stage(look: Look, record: ExperimentRecord) -> dict[str, int]:
    """Arm -> units that met it since the stage began: those assigned in its epochs, whenever they were written."""
    counts: dict[str, int] = {}
    for epoch, by_arm in look.exposed.items():
        for arm, n in by_arm.items() if epoch >= record.state.stage_epoch else ():
            counts[arm] = counts.get(arm, 0) + n
    return counts


def findings(store: ExperimentStore, record: ExperimentRecord, config: ExperimentConfig) -> Findings:
    """`find` on what the store knows now."""
    return find(store.look(record, questions=questions_of(config, record.plan)), record, config)


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
