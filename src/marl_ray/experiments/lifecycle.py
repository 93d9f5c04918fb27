"""The life of an experiment as pure functions: the actions that states allow, and the arms' traffic.

    draft --start--> running --promote--> promoted
                       |  ^                   |
                  pause|  |resume             | rollback of the winner
                       v  |                   v
                      paused --rollback--> rolled_back         draft, running, paused --stop--> stopped

A running `gradual` experiment climbs through stages. A rollback marks arms for good, in any state; the experiment is
rolled back when no treatment is left. `weights_of` is the only place that turns a state into traffic, and it gives a
marked arm nothing, whatever the state. `ramp_steps` decides from evidence which action comes next.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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
class RampPlan:
    """The part of an experiment's config that decides its traffic."""

    control: str
    weights: Mapping[str, float]
    """Arm -> weight as configured, the control among them."""
    strategy: str = "ab"
    """`ab`, `gradual`, `replace`, `shadow` or `thompson`."""
    stages: tuple[float, ...] = (1.0,)
    """The treatments' share by stage; only `gradual` has more than one."""
    min_exposures: int = 0
    """Minimum number of units that each arm with weight needs before a stage can end."""
    min_duration_s: float = 0.0
    """Minimum number of seconds that a stage lasts."""

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
    """Moment at which it was opened first, in seconds since 1970."""
    state: ExperimentState
    plan: RampPlan
    """The plan in the config."""

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


def plan_of(config: JsonMapping) -> RampPlan:
    """Return the plan in an experiment's stored config.

    A key that an older config lacks has the value of a plain A/B test.
    """
    arms, strategy = config["arms"], config.get("strategy", "ab")
    return RampPlan(
        control=config.get("control") or next(iter(arms)),
        weights={arm: float(part["weight"]) for arm, part in arms.items()},
        strategy=strategy,
        stages=tuple(config.get("stages", (1.0,))) if strategy == "gradual" else (1.0,),
        min_exposures=config.get("min_exposures", 0),
        min_duration_s=config.get("min_duration_s", 0.0),
    )


def weights_of(plan: RampPlan, state: ExperimentState) -> dict[str, float]:
    """Return arm -> weight in force.

    The control inherits the weight of rolled-back arms, so that the other treatments keep their shares: a rollback
    must not expose anyone to another treatment.
    """
    barred = state.rolled_back
    if state.status is ExperimentStatus.PROMOTED and state.winner in plan.weights and state.winner not in barred:
        return _all_traffic_to(plan, str(state.winner))
    if state.status is not ExperimentStatus.RUNNING or plan.strategy == "shadow":
        return _all_traffic_to(plan, plan.control)
    shares = dict(plan.weights)
    if plan.strategy == "thompson":
        shares = dict(state.allocation.weights) if state.allocation else shares
    elif plan.strategy != "ab":
        share = plan.stages[state.stage] if plan.strategy == "gradual" else 1.0
        shares = staged_weights(plan.weights, plan.control, share)
    remaining = {arm: 0.0 if arm in barred else weight for arm, weight in shares.items()}
    remaining[plan.control] = shares[plan.control] + math.fsum(shares[arm] for arm in plan.treatments if arm in barred)
    return remaining if any(remaining.values()) else _all_traffic_to(plan, plan.control)


def _all_traffic_to(plan: RampPlan, arm: str) -> dict[str, float]:
    return {other: float(other == arm) for other in plan.weights}


def shadows_of(plan: RampPlan, state: ExperimentState) -> tuple[str, ...]:
    """Return the arms that get a copy of the traffic and answer nobody."""
    if state.status is not ExperimentStatus.RUNNING or plan.strategy != "shadow":
        return ()
    return tuple(arm for arm in plan.treatments if arm not in state.rolled_back)


def transition(
    state: ExperimentState,
    action: Action,
    plan: RampPlan,
    now: float,
    arm: str | None = None,
    twins: Collection[str] = (),
) -> ExperimentState:
    """Return the state after an action, which `ALLOWED_STATUSES` and the plan must permit.

    `arm` names the treatment to promote (needed if there are several) or to roll back (all of them if None), and `twins`
    the treatments of the same weights, which are rolled back with it; `now` is in seconds since 1970. The epoch is one
    higher, except that rolling back what is rolled back already changes nothing. Raises MarlRayError if the action is
    forbidden.
    """
    if state.status not in ALLOWED_STATUSES[action]:
        expected = " or ".join(sorted(ALLOWED_STATUSES[action]))
        advice = "; create another" if state.status in (ExperimentStatus.ROLLED_BACK, ExperimentStatus.STOPPED) else ""
        raise MarlRayError(f"{action}: expected an experiment that is {expected}, this one is {state.status}{advice}")
    if arm is not None:
        _check_treatment(action, plan, arm)
    epoch = state.epoch + 1
    next_state = replace(state, epoch=epoch)
    stage_begun = replace(next_state, status=ExperimentStatus.RUNNING, stage_since=now, stage_epoch=epoch)
    match action:
        case Action.START | Action.RESUME:
            # A resumed stage begins anew: time and units of the pause prove nothing about it.
            return stage_begun
        case Action.NEXT_STAGE:
            if state.stage + 1 >= len(plan.stages):
                raise MarlRayError(f"next_stage: stage {state.stage + 1} of {len(plan.stages)} is the last")
            return replace(stage_begun, stage=state.stage + 1)
        case Action.PAUSE:
            return replace(next_state, status=ExperimentStatus.PAUSED)
        case Action.STOP:
            return replace(next_state, status=ExperimentStatus.STOPPED)
        case Action.PROMOTE:
            return replace(next_state, status=ExperimentStatus.PROMOTED, winner=_choose_winner(state, plan, arm))
        case Action.ROLLBACK:
            return _state_after_rollback(state, plan, (arm, *twins) if arm else plan.treatments)


def state_under_weights(
    state: ExperimentState, plan: RampPlan, weights: Mapping[str, float], now: float
) -> ExperimentState:
    """Return the state of a running `thompson` experiment under other weights.

    The weights begin a new epoch of the same stage. Rolled-back arms must have weight 0. Raises MarlRayError for
    another strategy or status, and for weights of other arms.
    """
    if state.status is not ExperimentStatus.RUNNING or plan.strategy != "thompson":
        raise MarlRayError(
            f"weights: expected a running experiment of strategy thompson, this is {state.status} {plan.strategy}"
        )
    positive = {arm for arm, weight in weights.items() if weight > 0}
    if weights.keys() != plan.weights.keys() or not positive or positive & state.rolled_back:
        raise MarlRayError(f"weights: expected one for each of {', '.join(plan.weights)}, none for rolled-back arms")
    return replace(state, epoch=state.epoch + 1, allocation=Allocation(dict(weights), now))


def _check_treatment(action: Action, plan: RampPlan, arm: str) -> None:
    if action not in (Action.PROMOTE, Action.ROLLBACK):
        raise MarlRayError(f"arm: {action} concerns the whole experiment, got arm {arm!r}")
    if arm not in plan.treatments:
        what = f"the control {arm!r}" if arm == plan.control else repr(arm)
        raise MarlRayError(f"arm: expected a treatment to {action} ({', '.join(plan.treatments)}), got {what}")


def _choose_winner(state: ExperimentState, plan: RampPlan, arm: str | None) -> str:
    eligible = _eligible_treatments(plan, state.rolled_back)
    if arm is None and len(eligible) != 1:
        raise MarlRayError(
            f"arm: expected which treatment to promote, one of {', '.join(eligible) or 'none that is left'}"
        )
    if arm in state.rolled_back:
        raise MarlRayError(f"arm: {arm!r} has been rolled back and cannot be promoted")
    return arm or eligible[0]


def _state_after_rollback(state: ExperimentState, plan: RampPlan, arms: tuple[str, ...]) -> ExperimentState:
    barred = state.rolled_back | set(arms)
    if barred == state.rolled_back:
        return state
    over = (
        state.winner in barred if state.status is ExperimentStatus.PROMOTED else not _eligible_treatments(plan, barred)
    )
    status = ExperimentStatus.ROLLED_BACK if over and state.status is not ExperimentStatus.STOPPED else state.status
    return replace(state, status=status, epoch=state.epoch + 1, rolled_back=barred)


def _eligible_treatments(plan: RampPlan, barred: frozenset[str]) -> list[str]:
    """Return the treatments that take part and are not rolled back."""
    in_play = [arm for arm in plan.treatments if plan.strategy == "shadow" or plan.weights[arm] > 0]
    return [arm for arm in in_play if arm not in barred]


def state_under_config(state: ExperimentState, before: RampPlan, after: RampPlan, now: float) -> ExperimentState:
    """Return the state under a config that assigns differently.

    The state is of the next epoch, in which the stage begins anew. Other stages or another strategy begin at the first
    stage. Raises MarlRayError if the new plan has no place for the state.
    """
    if after.control in state.rolled_back:
        raise MarlRayError(f"arms: the control {after.control!r} has been rolled back; expected another first arm")
    if state.winner is not None and state.winner not in after.weights:
        raise MarlRayError(f"arms: {state.winner!r} has been promoted, the config has no such arm")
    same_stages = (before.strategy, before.stages) == (after.strategy, after.stages)
    epoch, stage = state.epoch + 1, state.stage if same_stages else 0
    # Evidence allocates again from the config's weights.
    return replace(state, epoch=epoch, stage=stage, stage_since=now, stage_epoch=epoch, allocation=None)
