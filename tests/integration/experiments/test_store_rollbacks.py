"""The experiment store on any database: what is rolled back stays so, by arm, bundle and weights."""

from typing import Any

import pytest
import sqlalchemy as sa
from stores.units import act, config, gradual

from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import Action, ExperimentStatus
from marl_ray.experiments.store.facade import open_stores


def test_a_rolled_back_arm_stays_at_zero_in_its_experiment(url):
    stores = open_stores(url)
    stores.experiments.open("exp", config(a=1, b=1, c=2))
    record = act(stores, Action.ROLLBACK, arm="b", epoch=None, reason="harm")
    assert (record.weights, record.kept_at_zero, record.state.status) == ({"a": 2, "b": 0, "c": 2}, ("b",), "running")
    assert act(stores, Action.ROLLBACK, arm="b", epoch=None).epoch == 2  # nothing to do twice
    stores.close()
    stores = open_stores(url)
    assert stores.experiments.open("exp", config(a=1, b=1, c=2)).kept_at_zero == ("b",)
    allowing = config(a=1, b=100, c=2)
    allowing["arms"]["b"]["allow_rolled_back"] = True
    assert stores.experiments.open("exp", allowing).weights["b"] == 0
    stores.experiments.open("exp", config(a=1, c=2))  # b leaves the config and comes back, under another name too
    renamed = config(a=1, b=1, c=2, d=5)
    renamed["arms"]["d"] |= {"digest": "digest-b", "allow_rolled_back": True}
    assert stores.experiments.open("exp", renamed).weights == {"a": 7, "b": 0, "c": 2, "d": 0}
    assert stores.experiments.assignment_state("exp").rolled_back == {"b", "d"}
    changed = config(a=1, b=1, c=2, d=5)
    changed["arms"]["b"]["digest"] = "digest-new"
    with pytest.raises(
        MarlRayError, match="arm 'b' has been rolled back with bundle digest-b; expected a new arm name"
    ):
        stores.experiments.open("exp", changed)
    with pytest.raises(MarlRayError, match="the control 'b' has been rolled back"):
        stores.experiments.open("exp", config(b=1, a=1, c=2))
    with pytest.raises(MarlRayError, match="rolled back and cannot be promoted"):
        act(stores, Action.PROMOTE, arm="b")
    assert act(stores, Action.ROLLBACK).state.status is ExperimentStatus.ROLLED_BACK
    assert stores.experiments.assignment_state("exp").weights == {"a": 1, "b": 0, "c": 0, "d": 0}


def test_an_audit_entry_names_the_only_treatment_also_where_the_action_does_not(url):
    stores = open_stores(url)
    stores.experiments.open("exp", config(a=1, b=1))
    act(stores, Action.PROMOTE)
    act(stores, Action.ROLLBACK)
    assert [(entry.action, entry.arm) for entry in stores.experiments.audit("exp")][1:] == [
        ("promote", "b"),
        ("rollback", "b"),
    ]


def test_a_rolled_back_bundle_needs_leave_to_enter_another_experiment(url):
    stores = open_stores(url)
    stores.experiments.open("exp", config(a=1, b=1))
    act(stores, Action.ROLLBACK)
    with pytest.raises(
        MarlRayError, match=r"arms\.b: the weights of bundle digest-b have been rolled back in experiment 'exp'"
    ):
        stores.experiments.open("new", config(a=1, b=1))
    assert stores.experiments.read("new") is None
    allowing = config(a=1, b=1)
    allowing["arms"]["b"]["allow_rolled_back"] = True
    assert stores.experiments.open("new", allowing, actor="anna").weights == {"a": 1, "b": 1}
    assert [(entry.actor, entry.action, entry.arm) for entry in stores.experiments.audit("new")] == [
        ("anna", "open", None),
        ("anna", "allow_rolled_back", "b"),
    ]
    stores.experiments.open("new", allowing)
    assert len(stores.experiments.audit("new")) == 2


def weighing(assigned: dict[str, str], **weights: float) -> dict[str, Any]:
    """A config whose arms have a bundle of their own each, and weights as `of` says."""
    made = config(**weights)
    for arm, sha256 in assigned.items():
        made["arms"][arm] |= {"weights_sha256": sha256}
    return made


def test_weights_that_were_rolled_back_are_barred_in_any_bundle(url):
    stores = open_stores(url)
    stores.experiments.open("exp", weighing({"a": "good", "b": "bad"}, a=1, b=1))
    act(stores, Action.ROLLBACK)
    with pytest.raises(MarlRayError, match=r"arms\.c: the weights of bundle digest-c have been rolled back in .*'exp'"):
        stores.experiments.open("new", weighing({"a": "good", "c": "bad"}, a=1, c=1))
    assert stores.experiments.read("new") is None
    assert stores.experiments.open("new", weighing({"a": "good", "c": "other"}, a=1, c=1)).weights["c"] == 1
    # In the experiment itself they may come under another name, and get nothing.
    again = stores.experiments.open("exp", weighing({"a": "good", "d": "bad"}, a=1, d=1))
    assert again.state.rolled_back == {"b", "d"}
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with pytest.raises(sa.exc.DBAPIError, match="stays rolled back"), engine.begin() as connection:
        connection.execute(sa.text("UPDATE arms SET weights_sha256 = NULL WHERE arm = 'b'"))
    engine.dispose()
    stores.close()


def test_the_weights_of_an_arm_from_before_they_were_kept_are_learned_when_it_is_opened_again(url):
    stores = open_stores(url)
    stores.experiments.open("exp", config(a=1, b=1))
    act(stores, Action.ROLLBACK)
    stores.experiments.open("exp", weighing({"a": "good", "b": "bad"}, a=1, b=1))
    with pytest.raises(MarlRayError, match="the weights of bundle digest-c"):
        stores.experiments.open("new", weighing({"a": "good", "c": "bad"}, a=1, c=1))
    stores.close()


def test_a_bundle_rolled_back_elsewhere_gets_no_more_traffic_than_it_has(url):
    stores = open_stores(url)
    for name in ("exp", "other", "waiting"):
        stores.experiments.open(name, gradual(a=1, b=1) | {"autostart": name != "waiting"})
    act(stores, Action.ROLLBACK)
    for name, action in (("other", Action.NEXT_STAGE), ("other", Action.PROMOTE), ("waiting", Action.START)):
        with pytest.raises(MarlRayError, match=rf"'{name}': arms\.b: the weights of bundle digest-b have been"):
            act(stores, action, name)
    with pytest.raises(MarlRayError, match="weight 0, or allow_rolled_back"):
        stores.experiments.open("other", gradual(a=1, b=2))
    assert stores.experiments.open("other", gradual(a=1, b=1)).weights["b"] == 0.1  # replicas that restart must come up
    assert act(stores, Action.PAUSE, "other", epoch=None).weights["b"] == 0
    assert stores.experiments.open("other", gradual(a=1, b=0)).epoch == 3
    allowing = gradual(a=1, b=2)
    allowing["arms"]["b"]["allow_rolled_back"] = True
    stores.experiments.open("other", allowing)
    assert act(stores, Action.RESUME, "other").weights["b"] == 0.1
    assert [entry.action for entry in stores.experiments.audit("other")] == [
        "open",
        "open",
        "pause",
        "open",
        "open",
        "allow_rolled_back",
        "resume",
    ]


@pytest.mark.parametrize("strategy", ["ab", "shadow"])
def test_an_arm_without_weight_is_not_promoted_if_its_bundle_was_rolled_back_elsewhere(url, strategy):
    stores = open_stores(url)
    stores.experiments.open("other", config(a=1, b=1))
    stores.experiments.change("other", Action.ROLLBACK, epoch=None, actor="test", reason="harm", arm="b")
    arms = config(a=1, c=1, b=0) if strategy == "ab" else config(a=1, b=0)
    stores.experiments.open("exp", arms | {"strategy": strategy})
    with pytest.raises(
        MarlRayError, match=r"^experiment 'exp': arms\.b: the weights of bundle digest-b have been rolled"
    ):
        act(stores, Action.PROMOTE, arm="b")
    assert stores.experiments.read("exp").state.status is ExperimentStatus.RUNNING
    allowing = arms | {"strategy": strategy}
    allowing["arms"]["b"]["allow_rolled_back"] = True
    stores.experiments.open("exp", allowing)
    assert act(stores, Action.PROMOTE, arm="b").state.winner == "b"


def test_a_rollback_concerns_every_treatment_of_the_same_weights(url):
    """It makes no difference if a second name of a bundle comes before the rollback or after it."""
    stores = open_stores(url)
    twins = config(a=1, b=1, c=1, d=1, e=1)
    twins["arms"]["c"]["digest"] = "digest-b"
    twins["arms"]["b"]["weights_sha256"] = twins["arms"]["d"]["weights_sha256"] = "w"
    stores.experiments.open("exp", twins)
    record = act(stores, Action.ROLLBACK, arm="b", epoch=None, reason="harm")
    assert (record.epoch, record.state.rolled_back) == (2, {"b", "c", "d"})
    assert record.weights == {"a": 4, "b": 0, "c": 0, "d": 0, "e": 1}
    assert stores.experiments.assignment_state("exp").rolled_back == {"b", "c", "d"}
    with pytest.raises(MarlRayError, match="'c' has been rolled back and cannot be promoted"):
        act(stores, Action.PROMOTE, arm="c")
    assert act(stores, Action.ROLLBACK, arm="e", epoch=None).state.status is ExperimentStatus.ROLLED_BACK
