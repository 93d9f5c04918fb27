"""The states of an experiment, and the config of its plan."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_ray.config import ExperimentConfig, GatewayConfig, parse_config
from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import (
    ALLOWED_STATUSES,
    FINAL_STATUSES,
    OPEN_STATUSES,
    Action,
    ExperimentState,
    ExperimentStatus,
    RampPlan,
    plan_of,
    shadows_of,
    state_under_config,
    transition,
    weights_of,
)

PLAN = RampPlan("a", {"a": 1.0, "b": 1.0, "c": 3.0}, "gradual", (0.2, 0.5, 1.0), min_exposures=10, min_duration_s=60)
RUNNING = ExperimentState(ExperimentStatus.RUNNING, stage_since=1_000.0)


def test_a_status_is_final_exactly_where_nothing_but_a_rollback_is_possible():
    for status in ExperimentStatus:
        possible = {action for action in Action if status in ALLOWED_STATUSES[action]}
        assert (status in FINAL_STATUSES) == (possible == {Action.ROLLBACK}) == (status.value in FINAL_STATUSES)
    assert not OPEN_STATUSES & FINAL_STATUSES and set(ExperimentStatus) == OPEN_STATUSES | FINAL_STATUSES


def test_every_action_is_possible_exactly_where_the_table_says():
    for status, action in product(ExperimentStatus, Action):
        state = replace(RUNNING, status=status, winner="b" if status is ExperimentStatus.PROMOTED else None)
        arm = "b" if action is Action.PROMOTE else None
        if status in ALLOWED_STATUSES[action]:
            assert transition(state, action, PLAN, 1.0, arm).epoch == 2
        else:
            with pytest.raises(
                MarlRayError, match=f"{action}: expected an experiment that is .*, this one is {status}"
            ):
                transition(state, action, PLAN, 1.0, arm)


@pytest.mark.parametrize(
    ("action", "arm", "message"),
    [
        (Action.PAUSE, "b", "arm: pause concerns the whole experiment, got arm 'b'"),
        (Action.ROLLBACK, "a", r"arm: expected a treatment to rollback \(b, c\), got the control 'a'"),
        (Action.PROMOTE, "x", r"expected a treatment to promote \(b, c\), got 'x'"),
        (Action.PROMOTE, None, "expected which treatment to promote, one of b, c"),
    ],
)
def test_an_action_concerns_the_arms_it_can_concern(action, arm, message):
    with pytest.raises(MarlRayError, match=message):
        transition(RUNNING, action, PLAN, 1.0, arm)


def test_weights_follow_the_state():
    ab, shadow, at_once = (replace(PLAN, strategy=name, stages=(1.0,)) for name in ("ab", "shadow", "replace"))
    control = {"a": 1.0, "b": 0.0, "c": 0.0}
    assert weights_of(PLAN, RUNNING) == pytest.approx({"a": 0.8, "b": 0.05, "c": 0.15})
    assert weights_of(PLAN, replace(RUNNING, stage=2)) == {"a": 0.0, "b": 0.25, "c": 0.75}
    assert weights_of(ab, RUNNING) == ab.weights
    assert weights_of(at_once, RUNNING) == {"a": 0.0, "b": 0.25, "c": 0.75}
    assert weights_of(shadow, RUNNING) == control
    assert shadows_of(shadow, RUNNING) == ("b", "c")
    assert shadows_of(shadow, replace(RUNNING, rolled_back=frozenset("b"))) == ("c",)
    assert shadows_of(shadow, replace(RUNNING, status=ExperimentStatus.PAUSED)) == shadows_of(ab, RUNNING) == ()
    for status in set(ExperimentStatus) - {ExperimentStatus.RUNNING, ExperimentStatus.PROMOTED}:
        assert weights_of(ab, replace(RUNNING, status=status)) == control
    promoted = replace(RUNNING, status=ExperimentStatus.PROMOTED, winner="c")
    assert weights_of(PLAN, promoted) == {"a": 0.0, "b": 0.0, "c": 1.0}
    assert weights_of(PLAN, transition(promoted, Action.ROLLBACK, PLAN, 1.0, "c")) == control


def test_a_rollback_leaves_the_other_treatments_shares_alone():
    state = transition(RUNNING, Action.ROLLBACK, PLAN, 1.0, "c")
    assert (state.status, weights_of(PLAN, state)) == (
        ExperimentStatus.RUNNING,
        pytest.approx({"a": 0.95, "b": 0.05, "c": 0.0}),
    )
    assert transition(state, Action.ROLLBACK, PLAN, 1.0, "c") is state
    assert transition(state, Action.ROLLBACK, PLAN, 1.0).status is ExperimentStatus.ROLLED_BACK
    without_control = RampPlan("a", {"a": 0.0, "b": 1.0})
    state = transition(RUNNING, Action.ROLLBACK, without_control, 1.0, "b")
    assert (state.status, weights_of(without_control, state)) == (ExperimentStatus.ROLLED_BACK, {"a": 1.0, "b": 0.0})
    stopped = replace(RUNNING, status=ExperimentStatus.STOPPED)
    assert transition(stopped, Action.ROLLBACK, PLAN, 1.0).status is ExperimentStatus.STOPPED


def test_a_stage_begins_with_its_start_its_resumption_and_its_config():
    state = transition(transition(RUNNING, Action.PAUSE, PLAN, 5.0), Action.RESUME, PLAN, 7.0)
    assert (state.stage_since, state.stage_epoch, state.epoch) == (7.0, 3, 3)
    second = transition(state, Action.NEXT_STAGE, PLAN, 8.0)
    assert (second.stage, second.stage_since, second.stage_epoch) == (1, 8.0, 4)
    heavier = replace(PLAN, weights={"a": 1.0, "b": 2.0})
    assert state_under_config(second, PLAN, heavier, 9.0) == replace(second, epoch=5, stage_since=9.0, stage_epoch=5)
    assert state_under_config(second, PLAN, replace(PLAN, stages=(0.1, 0.9)), 9.0).stage == 0
    marked = transition(second, Action.ROLLBACK, PLAN, 10.0, "b")
    assert (marked.stage, marked.stage_since) == (1, 8.0)
    with pytest.raises(MarlRayError, match=r"^arms: the control 'b' has been rolled back; expected another first arm$"):
        state_under_config(marked, PLAN, replace(PLAN, control="b"), 9.0)
    promoted = transition(second, Action.PROMOTE, PLAN, 9.0, "c")
    with pytest.raises(MarlRayError, match=r"^arms: 'c' has been promoted, the config has no such arm$"):
        state_under_config(promoted, PLAN, heavier, 9.0)


@given(
    st.sampled_from(["ab", "gradual", "shadow", "replace"]),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.0, 1.0, 7.5]), min_size=2).map(
        lambda w: w | {"a": 0.0}
    ),
    st.sampled_from([ExperimentStatus.DRAFT, ExperimentStatus.RUNNING]),
    st.lists(st.tuples(st.sampled_from(list(Action)), st.sampled_from([None, "b", "c", "d"])), max_size=30),
)
def test_no_sequence_of_actions_gives_a_rolled_back_arm_traffic(strategy, weights, status, steps):
    plan = RampPlan("a", weights, strategy, (0.3, 0.6) if strategy == "gradual" else (1.0,))
    state, barred = ExperimentState(status), frozenset[str]()
    for now, (action, arm) in enumerate(steps):
        before = state
        try:
            state = transition(state, action, plan, float(now), arm)
        except MarlRayError:
            continue
        if action is Action.ROLLBACK:
            barred |= {arm} if arm else set(plan.treatments)
        assert state.epoch == before.epoch + (state != before)
        assert state.rolled_back == barred
        in_force = weights_of(plan, state)
        assert in_force.keys() == weights.keys()
        assert sum(in_force.values()) > 0
        assert not any(in_force.get(arm) for arm in barred)
        assert not barred & set(shadows_of(plan, state))


def experiment(**more) -> ExperimentConfig:
    return parse_config(ExperimentConfig, {"name": "exp", "arms": {"a": {"bundle": "x"}, "b": {"bundle": "y"}}} | more)


def test_a_config_makes_the_plan():
    config = experiment(strategy="gradual", stages=[0.1, 0.4], guardrails=[{"name": "cost", "margin": 0.5}])
    cost = config.guardrails[0]
    assert (cost.name, cost.better, cost.margin, cost.alpha, cost.is_binary) == ("cost", "lower", 0.5, 0.05, False)
    assert experiment(guardrails=[{"name": "error"}]).guardrails[0].is_binary
    assert experiment(guardrails=[{"name": "outcome"}]).guardrails[0].better == "higher"
    assert plan_of(config.resolve()) == RampPlan("a", {"a": 1.0, "b": 1.0}, "gradual", (0.1, 0.4), 100, 60.0)
    assert plan_of(experiment().resolve()).stages == (1.0,)
    assert parse_config(ExperimentConfig, config.resolve()) == config  # as Serve hands it on
    older = {"salt": "s", "arms": {"a": {"digest": "x", "weight": 1}, "b": {"digest": "y", "weight": 3}}}
    assert plan_of(older) == RampPlan("a", {"a": 1.0, "b": 3.0})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"strategy": "canary"}, "strategy"),
        ({"stages": []}, "stages"),
        ({"stages": [0.5, 0.25]}, r"stages: expected rising shares of 1e-06 at least and 1 at most, got \[0.5, 0.25\]"),
        ({"stages": [0.0, 1.0]}, "stages: expected rising"),
        ({"stages": [0.5, 1.5]}, "stages.1"),
        ({"layer": "l", "layer_share": [0.5, 0.5]}, r"layer_share: expected low < high, got \[0.5, 0.5\)"),
        ({"layer": "l", "layer_share": [0, 2]}, "layer_share.1"),
        ({"layer_share": [0, 0.5]}, "layer_share: needs a layer"),
        ({"guardrails": [{"name": "toxicity"}]}, "better: expected lower or higher for the metric 'toxicity'"),
        ({"guardrails": [{"name": "cost"}, {"name": "cost"}]}, "guardrails: names must differ"),
        ({"guardrails": [{"name": "cost", "margin": -1}]}, "guardrails.0.margin"),
        ({"on_rollback": "later"}, "on_rollback"),
        ({"alpha_rollback": 0}, "alpha_rollback"),
        (
            {"strategy": "replace", "arms": {"a": {"bundle": "x"}, "b": {"bundle": "y", "weight": 0}}},
            "strategy replace needs a treatment",
        ),
    ],
)
def test_impossible_configs_are_one_line(more, message):
    with pytest.raises(MarlRayError, match=message) as caught:
        experiment(**more)
    assert "\n" not in str(caught.value)


def test_experiments_of_a_layer_are_disjoint():
    def gateway(*shares: tuple[str | None, float, float]) -> GatewayConfig:
        parts = [
            experiment(name=f"e{k}", layer=layer, **({"layer_share": share} if layer else {})).resolve()
            for k, (layer, *share) in enumerate(shares)
        ]
        return parse_config(GatewayConfig, {"experiments": parts})

    gateway(("l", 0.5, 1.0), ("l", 0.0, 0.5), ("m", 0.0, 1.0), (None, 0, 1))
    with pytest.raises(
        MarlRayError, match=r"^config: experiments: e1 and e0 overlap in layer 'l', expected disjoint layer_share$"
    ):
        gateway(("l", 0.4, 1.0), ("l", 0.0, 0.5))
