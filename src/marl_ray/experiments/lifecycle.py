"""The life of an experiment as pure functions: which actions a state allows, the state after each, and each arm's traffic.

    draft --start--> running --promote--> promoted
                       |  ^                   |
                  pause|  |resume             | rollback of the winner
                       v  |                   v
                      paused --rollback--> rolled_back         draft, running, paused --stop--> stopped

A running `gradual` experiment climbs through stages. A rollback marks arms for good, in any state; the experiment is
rolled back when no treatment is left. `weights_of` is the only place that turns a state into traffic, and it gives a
marked arm nothing, whatever the state.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from marl_ray.errors import FieldError, MarlRayError
from marl_ray.experiments.assignment.rendezvous import staged_weights
from marl_ray.json_types import JsonMapping, JsonObject


class ExperimentStatus(StrEnum):
    """The statuses of an experiment."""

    DRAFT = "draft"
    RUNNING = "running"
    PAUSED = "paused"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    STOPPED = "stopped"


OPEN_STATUSES = frozenset({ExperimentStatus.DRAFT, ExperimentStatus.RUNNING, ExperimentStatus.PAUSED})
"""Statuses of experiments that are not over."""
FINAL_STATUSES = frozenset(ExperimentStatus) - OPEN_STATUSES
"""Statuses of experiments that are over; only a rollback still changes one."""


class Action(StrEnum):
    """The changes that people and gateways make to an experiment."""

    START = "start"
    NEXT_STAGE = "next_stage"
    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ROLLBACK = "rollback"
    STOP = "stop"


ALLOWED_STATUSES: Mapping[Action, frozenset[ExperimentStatus]] = {
    Action.START: frozenset({ExperimentStatus.DRAFT}),
    Action.NEXT_STAGE: frozenset({ExperimentStatus.RUNNING}),
    Action.PAUSE: frozenset({ExperimentStatus.RUNNING}),
    Action.RESUME: frozenset({ExperimentStatus.PAUSED}),
    Action.PROMOTE: frozenset({ExperimentStatus.RUNNING}),
    # Late outcomes can prove harm when all is over, and an arm's mark must then still be possible.
    Action.ROLLBACK: frozenset(ExperimentStatus),
    Action.STOP: OPEN_STATUSES,
}
"""Action -> the states in which it is possible."""

RETREATS = frozenset({Action.PAUSE, Action.ROLLBACK, Action.STOP})
"""Actions that only take traffic from treatments. They are as right on a later epoch, so they need not name one."""


class StaleEpochError(FieldError):
    """A change was decided on an epoch that is over; read the experiment again and decide anew."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The part of an experiment's config that decides its traffic."""

    control: str
    weights: Mapping[str, float]
    """Arm -> weight as configured, the control among them."""
    strategy: str = "ab"
    stages: tuple[float, ...] = (1.0,)
    """The treatments' share by stage; only `gradual` has more than one."""
    min_exposures: int = 0
    min_duration_s: float = 0.0

    @property
    def treatments(self) -> tuple[str, ...]:
        """Every arm but the control, in the config's order."""
        return tuple(arm for arm in self.weights if arm != self.control)


@dataclass(frozen=True, slots=True)
class ExperimentState:
    """The state of an experiment at one moment."""

    status: ExperimentStatus
    epoch: int = 1
    """Counts every change of state and every change of the config that concerns assignment, from 1."""
    stage: int = 0
    stage_since: float = 0.0
    """Start of the stage, in seconds since 1970."""
    stage_epoch: int = 1
    """The epoch that the stage began with."""
    winner: str | None = None
    rolled_back: frozenset[str] = frozenset()
    """Arms that get no traffic for good."""
    allocation: "Allocation | None" = None
    """Weights that Thompson sampling has set; None before there is evidence, and for every other strategy."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Weights that Thompson sampling set from the evidence."""

    weights: Mapping[str, float]
    at: float
    """Moment at which they were set, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class ExperimentRecord:
    """An experiment as stored."""

    name: str
    config: JsonObject
    created: float
    state: ExperimentState
    plan: RolloutPlan

    @property
    def epoch(self) -> int:
        """The epoch of the state, which grows with every change of it."""
        return self.state.epoch

    @property
    def weights(self) -> dict[str, float]:
        """The weights in force."""
        return weights_of(self.plan, self.state)

    @property
    def kept_at_zero(self) -> tuple[str, ...]:
        """Arms to which the config gives weight and which get none, because they have been rolled back."""
        return tuple(arm for arm, w in self.plan.weights.items() if w > 0 and arm in self.state.rolled_back)


def plan_of(config: JsonMapping) -> RolloutPlan:
    """Return the plan in an experiment's stored config; keys that older configs lack mean the plain A/B test."""
    arms, strategy = config["arms"], config.get("strategy", "ab")
    return RolloutPlan(
        control=config.get("control") or next(iter(arms)),
        weights={arm: float(part["weight"]) for arm, part in arms.items()},
        strategy=strategy,
        stages=tuple(config.get("stages", (1.0,))) if strategy == "gradual" else (1.0,),
        min_exposures=config.get("min_exposures", 0),
        min_duration_s=config.get("min_duration_s", 0.0),
    )


def weights_of(plan: RolloutPlan, state: ExperimentState) -> dict[str, float]:
    """Return arm -> weight in force.

    The control inherits the weight of rolled-back arms, so that the other treatments keep their shares: a rollback
    must not expose anyone to another treatment.
    """
    barred = state.rolled_back
    if state.status is ExperimentStatus.PROMOTED and state.winner in plan.weights and state.winner not in barred:
        return _only(plan, str(state.winner))
    if state.status is not ExperimentStatus.RUNNING or plan.strategy == "shadow":
        return _only(plan, plan.control)
    granted = dict(plan.weights)
    if plan.strategy == "thompson":
        granted = dict(state.allocation.weights) if state.allocation else granted
    elif plan.strategy != "ab":
        share = plan.stages[state.stage] if plan.strategy == "gradual" else 1.0
        granted = staged_weights(plan.weights, plan.control, share)
    remaining = {arm: 0.0 if arm in barred else weight for arm, weight in granted.items()}
    remaining[plan.control] = granted[plan.control] + math.fsum(
        granted[arm] for arm in plan.treatments if arm in barred
    )
    return remaining if any(remaining.values()) else _only(plan, plan.control)


def _only(plan: RolloutPlan, arm: str) -> dict[str, float]:
    return {other: float(other == arm) for other in plan.weights}


def shadows_of(plan: RolloutPlan, state: ExperimentState) -> tuple[str, ...]:
    """Return the arms that get a copy of the traffic and answer nobody."""
    if state.status is not ExperimentStatus.RUNNING or plan.strategy != "shadow":
        return ()
    return tuple(arm for arm in plan.treatments if arm not in state.rolled_back)


def transition(
    state: ExperimentState, action: Action, plan: RolloutPlan, now: float, arm: str | None = None
) -> ExperimentState:
    """Return the state after an action, which `ALLOWED_STATUSES` and the plan must permit.

    `arm` names the treatment to promote (needed if there are several) or to roll back (all of them if None); `now` is in
    seconds since 1970. The epoch is one higher, except that rolling back what is rolled back already changes nothing. Raises
    MarlRayError if the action is forbidden.
    """
    if state.status not in ALLOWED_STATUSES[action]:
        expected = " or ".join(sorted(ALLOWED_STATUSES[action]))
        more = "; create another" if state.status in (ExperimentStatus.ROLLED_BACK, ExperimentStatus.STOPPED) else ""
        raise MarlRayError(f"{action}: expected an experiment that is {expected}, this one is {state.status}{more}")
    if arm is not None:
        _check_treatment(action, plan, arm)
    epoch = state.epoch + 1
    next_state = replace(state, epoch=epoch)
    begun = replace(next_state, status=ExperimentStatus.RUNNING, stage_since=now, stage_epoch=epoch)
    match action:
        case Action.START | Action.RESUME:
            # A resumed stage begins anew: time and units of the pause prove nothing about it.
            return begun
        case Action.NEXT_STAGE:
            if state.stage + 1 >= len(plan.stages):
                raise MarlRayError(f"next_stage: stage {state.stage + 1} of {len(plan.stages)} is the last")
            return replace(begun, stage=state.stage + 1)
        case Action.PAUSE:
            return replace(next_state, status=ExperimentStatus.PAUSED)
        case Action.STOP:
            return replace(next_state, status=ExperimentStatus.STOPPED)
        case Action.PROMOTE:
            return replace(next_state, status=ExperimentStatus.PROMOTED, winner=_winner(state, plan, arm))
        case Action.ROLLBACK:
            return _rolled_back(state, plan, (arm,) if arm else plan.treatments)


def state_under_weights(
    state: ExperimentState, plan: RolloutPlan, weights: Mapping[str, float], now: float
) -> ExperimentState:
    """Return the state of a running `thompson` experiment under other weights.

    They are a new epoch of the same stage. Rolled-back arms must have weight 0. Raises MarlRayError for another strategy or
    status, and for weights of other arms.
    """
    if state.status is not ExperimentStatus.RUNNING or plan.strategy != "thompson":
        raise MarlRayError(
            f"weights: expected a running experiment of strategy thompson, this is {state.status} {plan.strategy}"
        )
    positive = {arm for arm, weight in weights.items() if weight > 0}
    if weights.keys() != plan.weights.keys() or not positive or positive & state.rolled_back:
        raise MarlRayError(f"weights: expected one for each of {', '.join(plan.weights)}, none for rolled-back arms")
    return replace(state, epoch=state.epoch + 1, allocation=Allocation(dict(weights), now))


def _check_treatment(action: Action, plan: RolloutPlan, arm: str) -> None:
    if action not in (Action.PROMOTE, Action.ROLLBACK):
        raise MarlRayError(f"arm: {action} concerns the whole experiment, got arm {arm!r}")
    if arm not in plan.treatments:
        what = f"the control {arm!r}" if arm == plan.control else repr(arm)
        raise MarlRayError(f"arm: expected a treatment to {action} ({', '.join(plan.treatments)}), got {what}")


def _winner(state: ExperimentState, plan: RolloutPlan, arm: str | None) -> str:
    eligible = _eligible(plan, state.rolled_back)
    if arm is None and len(eligible) != 1:
        raise MarlRayError(
            f"arm: expected which treatment to promote, one of {', '.join(eligible) or 'none that is left'}"
        )
    if arm in state.rolled_back:
        raise MarlRayError(f"arm: {arm!r} has been rolled back and cannot be promoted")
    return arm or eligible[0]


def _rolled_back(state: ExperimentState, plan: RolloutPlan, arms: tuple[str, ...]) -> ExperimentState:
    barred = state.rolled_back | set(arms)
    if barred == state.rolled_back:
        return state
    over = state.winner in barred if state.status is ExperimentStatus.PROMOTED else not _eligible(plan, barred)
    status = ExperimentStatus.ROLLED_BACK if over and state.status is not ExperimentStatus.STOPPED else state.status
    return replace(state, status=status, epoch=state.epoch + 1, rolled_back=barred)


def _eligible(plan: RolloutPlan, barred: frozenset[str]) -> list[str]:
    """Return the treatments that take part and are not rolled back."""
    in_play = [arm for arm in plan.treatments if plan.strategy == "shadow" or plan.weights[arm] > 0]
    return [arm for arm in in_play if arm not in barred]


def state_under_config(state: ExperimentState, before: RolloutPlan, after: RolloutPlan, now: float) -> ExperimentState:
    """Return the state under a config that assigns differently: the next epoch, its stage begun anew.

    Other stages or another strategy begin at the first stage. Raises MarlRayError if the new plan has no place
    for the state.
    """
    if after.control in state.rolled_back:
        raise MarlRayError(f"arms: the control {after.control!r} has been rolled back; expected another first arm")
    if state.winner is not None and state.winner not in after.weights:
        raise MarlRayError(f"arms: {state.winner!r} has been promoted, the config has no such arm")
    same_stages = (before.strategy, before.stages) == (after.strategy, after.stages)
    epoch, stage = state.epoch + 1, state.stage if same_stages else 0
    # Evidence allocates again from the config's weights.
    return replace(state, epoch=epoch, stage=stage, stage_since=now, stage_epoch=epoch, allocation=None)


class RolloutStep(StrEnum):
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
    """Name of the metric that proved harm (`outcome` or a guardrail), or None; never one with unequal reports."""
    tested: bool = True
    """True if the arm has enough outcomes for the harm test."""
    promotable: bool = False
    """True if the promotion bound holds."""
    estimate: float = 0.0
    """Estimated gain; the promotable arm with the largest one wins."""
    unequal: str | None = None
    """A sentence that names the metric that the arm's units report more or less often than the control's, or None."""
    unguarded: str | None = None
    """A sentence that names the guardrail with too few values for a test, or says that no outcome has come; else None."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Results of the statistics, as plain values."""

    arms: Mapping[str, ArmEvidence] = field(default_factory=dict)
    srm_alarm: bool = False


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """A step, the arm it concerns, the reason for it, and the epoch whose evidence it rests on."""

    step: RolloutStep
    epoch: int
    reason: str
    arm: str | None = None


def advance(record: ExperimentRecord, evidence: Evidence, now: float) -> RolloutDecision:
    """Decide the next step of the experiment at `now`, in seconds since 1970.

    Proven harm comes first and waits for nothing, not even for a clean traffic split. Then a suspicious split holds
    everything, and so do reports that one arm's units lack. Only when the stage has had its exposures and its time does
    the next stage follow, or the promotion after the last stage. Missing evidence, that of guardrails included, never
    promotes an arm and never takes the control's last units.
    """
    plan, state = record.plan, record.state
    by_arm = {arm: evidence.arms.get(arm, ArmEvidence()) for arm in plan.weights}
    active = [arm for arm in plan.treatments if arm not in state.rolled_back]
    for arm in active:
        if by_arm[arm].harm is not None:
            return RolloutDecision(RolloutStep.ROLLBACK, state.epoch, f"harm proven by {by_arm[arm].harm}", arm)
    if state.status is not ExperimentStatus.RUNNING:
        status = state.status.replace("_", " ")
        return RolloutDecision(RolloutStep.HOLD, state.epoch, f"the experiment is {status}")
    if evidence.srm_alarm:
        return RolloutDecision(RolloutStep.HOLD_SRM, state.epoch, "sample ratio mismatch")
    unequal = [problem for arm in active if record.weights[arm] > 0 and (problem := by_arm[arm].unequal) is not None]
    if unequal:
        return RolloutDecision(RolloutStep.HOLD_REPORTING, state.epoch, unequal[0])
    exposed = min((by_arm[arm].exposures for arm, weight in record.weights.items() if weight > 0), default=0)
    if exposed < plan.min_exposures:
        return RolloutDecision(
            RolloutStep.HOLD, state.epoch, f"{exposed} of {plan.min_exposures} exposures in this stage"
        )
    if now - state.stage_since < plan.min_duration_s:
        return RolloutDecision(
            RolloutStep.HOLD,
            state.epoch,
            f"{now - state.stage_since:.0f} of {plan.min_duration_s:g} s in this stage",
        )
    untested = [arm for arm in active if record.weights[arm] > 0 and not by_arm[arm].tested]
    if untested:  # no proof of harm means nothing yet
        unguarded = next((lack for arm in untested if (lack := by_arm[arm].unguarded)), None)
        return RolloutDecision(
            RolloutStep.HOLD, state.epoch, unguarded or f"too few outcomes to test {', '.join(untested)} for harm"
        )
    proven = [arm for arm in active if by_arm[arm].promotable]
    promotable = [arm for arm in proven if by_arm[arm].unguarded is None]
    more = plan.stages[state.stage + 1 :]
    # If the next stage gives the control nothing, the comparison cannot grow any more: the proof must come before it.
    if more and (more[0] < 1 or promotable):
        return RolloutDecision(
            RolloutStep.NEXT_STAGE, state.epoch, f"no harm at {plan.stages[state.stage]:g} of the units"
        )
    if not promotable:
        lacking = by_arm[proven[0]].unguarded if proven else None
        return RolloutDecision(RolloutStep.HOLD, state.epoch, lacking or "the promotion bound does not hold yet")
    best = max(promotable, key=lambda arm: by_arm[arm].estimate)
    return RolloutDecision(RolloutStep.PROMOTE, state.epoch, "the promotion bound holds", best)
