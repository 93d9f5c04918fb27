"""The step that evidence about the arms calls for."""

from dataclasses import replace

from marl_ray.experiments.lifecycle import ExperimentRecord, ExperimentState, ExperimentStatus, RampPlan
from marl_ray.experiments.ramp_steps import ArmEvidence, RampEvidence, RampStep, decide_step

PLAN = RampPlan("a", {"a": 1.0, "b": 1.0, "c": 3.0}, "gradual", (0.2, 0.5, 1.0), min_exposures=10, min_duration_s=60)
RUNNING = ExperimentState(ExperimentStatus.RUNNING, stage_since=1_000.0)


def decide(
    state: ExperimentState = RUNNING,
    now: float = 1_060.0,
    plan: RampPlan = PLAN,
    srm: bool = False,
    **arms: ArmEvidence,
):
    enough = {arm: ArmEvidence(10) for arm in plan.weights}
    record = ExperimentRecord("exp", {}, 0.0, state, plan)
    decision = decide_step(record, RampEvidence(enough | arms, srm), now)
    assert decision.epoch == state.epoch
    return decision.step, decision.arm, decision.reason


def test_harm_rolls_back_at_once_and_in_any_state():
    harmed = ArmEvidence(0, harm="cost", promotable=True)
    for status in ExperimentStatus:
        state = replace(RUNNING, status=status)
        assert decide(state, 1_000.0, srm=True, c=harmed) == (RampStep.ROLLBACK, "c", "harm proven by cost")
    assert decide(replace(RUNNING, rolled_back=frozenset("c")), c=harmed)[0] is RampStep.NEXT_STAGE
    # Harm is measured against the control, which cannot do any.
    assert decide(a=replace(harmed, exposures=10))[0] is RampStep.NEXT_STAGE


def test_a_stage_needs_a_clean_split_exposures_and_time():
    assert decide() == (RampStep.NEXT_STAGE, None, "no harm at 0.2 of the units")
    assert decide(srm=True)[0] is RampStep.HOLD_SRM
    assert decide(b=ArmEvidence(9)) == (RampStep.HOLD, None, "9 of 10 exposures in this stage")
    assert decide(now=1_059.0) == (RampStep.HOLD, None, "59 of 60 s in this stage")
    assert decide(replace(RUNNING, status=ExperimentStatus.PAUSED), srm=True) == (
        RampStep.HOLD,
        None,
        "the experiment is paused",
    )
    assert decide(replace(RUNNING, status=ExperimentStatus.ROLLED_BACK))[2] == "the experiment is rolled back"
    # An arm without traffic has no exposures to wait for.
    assert decide(replace(RUNNING, rolled_back=frozenset("c")), c=ArmEvidence(0))[0] is RampStep.NEXT_STAGE
    assert decide(replace(RUNNING, stage=2), a=ArmEvidence(0))[2] == "the promotion bound does not hold yet"


def test_the_best_promotable_arm_is_promoted_after_the_last_stage():
    good, better = ArmEvidence(10, promotable=True, estimate=0.1), ArmEvidence(10, promotable=True, estimate=0.2)
    last = replace(RUNNING, stage=2)
    assert decide(b=good)[0] is RampStep.NEXT_STAGE
    assert decide(last, b=good)[:2] == (RampStep.PROMOTE, "b")
    assert decide(last, b=good, c=better)[:2] == (RampStep.PROMOTE, "c")
    assert decide(last, srm=True, b=good)[0] is RampStep.HOLD_SRM
    assert decide(last)[0] is RampStep.HOLD
