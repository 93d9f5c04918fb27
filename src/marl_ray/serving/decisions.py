"""From what the store knows to what is done with an experiment: the statistics asked, the decision taken, and written.

Every replica may decide. A decision names the epoch it was made on, so of several replicas one is heard; and harm needs no
majority: the first replica to see the proof rolls the arm back.
"""

import logging
import time

from marl_ray.config import ExperimentConfig
from marl_ray.experiments.sequential import harm, promotion
from marl_ray.experiments.srm import sample_ratio
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
NOTHING = Summary(0, 0.0, 0.0)

_log = logging.getLogger(__name__)


def evidence(store: ExperimentStore, record: ExperimentRecord, config: ExperimentConfig) -> Evidence:
    """What outcomes, guardrails and counts prove now. Alphas are shared by the treatments (Bonferroni)."""
    outcomes = {arm: summary.outcomes for arm, summary in store.summary(record.name).items()}
    metrics = {"outcome": outcomes} | store.metric_summaries(record.name)
    exposures = store.stage_exposures(record.name)
    control, treatments = record.plan.control, record.plan.treatments
    arms = {control: ArmEvidence(exposures.get(control, 0))}
    for arm in treatments:
        mine, theirs = outcomes.get(arm, NOTHING), outcomes.get(control, NOTHING)
        asked = {"alpha": config.alpha / len(treatments), "margin": config.margin, "min_outcomes": config.min_outcomes}
        bound = promotion(mine, theirs, **asked)  # type: ignore[arg-type]
        found = _harm(config, metrics, arm, control, len(treatments))
        arms[arm] = ArmEvidence(exposures.get(arm, 0), found, bound.proven, bound.gain)
    return Evidence(arms, sample_ratio(exposures, record.weights).alarm)


def _harm(
    config: ExperimentConfig, metrics: dict[str, dict[str, Summary]], arm: str, control: str, treatments: int
) -> str | None:
    """The first quantity in which the arm is proven worse than the control by more than is accepted."""
    asked = [("outcome", "higher", config.margin, config.alpha_rollback)]
    asked += [(rail.name, rail.better, rail.margin, rail.alpha) for rail in config.guardrails]
    for name, better, margin, alpha in asked:
        found = metrics.get(name, {})
        proof = harm(
            found.get(arm, NOTHING),
            found.get(control, NOTHING),
            alpha=alpha / treatments,
            margin=margin,
            min_outcomes=config.min_outcomes,
            higher_is_better=better == "higher",
        )
        if proof.proven:
            return name
    return None


def decide(store: ExperimentStore, config: ExperimentConfig) -> Decision | None:
    """Look once, and do what the look calls for. None for an experiment that is over or unknown.

    An experiment that promotes by hand keeps running when its promotion bound holds.
    """
    record = store.experiment(config.name)
    if record is None or record.state.status not in (Status.RUNNING, Status.PAUSED, Status.PROMOTED):
        return None
    decision = advance(record, evidence(store, record, config), time.time())
    action = ACTIONS.get(decision.step)
    if action is None or (action is Action.PROMOTE and not config.promotes):
        return decision
    try:
        store.change(config.name, action, epoch=decision.epoch, actor=ACTOR, reason=decision.reason, arm=decision.arm)
    except StaleEpochError:
        return None  # another replica was faster, or a person
    _log.warning("experiment %s: %s %s: %s", config.name, action, decision.arm or "", decision.reason)
    return decision
