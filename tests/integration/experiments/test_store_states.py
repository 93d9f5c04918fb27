"""The experiment store on any database: states of experiments."""

import multiprocessing
import threading
from itertools import pairwise
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from stores.racing import advance
from stores.units import act, config, exposure, gradual, look

from marl_ray.errors import MarlRayError
from marl_ray.experiments.assignment.population import population_of
from marl_ray.experiments.assignment.rendezvous import AssignmentTable
from marl_ray.experiments.database import schema
from marl_ray.experiments.lifecycle import Action, ExperimentStatus, StaleEpochError
from marl_ray.experiments.store.facade import open_stores
from marl_ray.experiments.store.records import Production


def test_a_gradual_ramp_goes_from_draft_to_promotion(url):
    stores = open_stores(url)
    assert stores.experiments.open("exp", gradual(a=1, b=1) | {"autostart": False}).weights == {
        "a": 1,
        "b": 0,
    }
    seen = [act(stores, Action.START, reason="go").weights["b"]]
    stores.units.record_exposures([exposure("early", "b", 1), exposure("now", "b", 2), exposure("other", "a", 2)])
    assert look(stores).exposed == {1: {"b": 1}, 2: {"a": 1, "b": 1}}
    seen += [act(stores, Action.NEXT_STAGE).weights["b"]]
    seen += [act(stores, action).weights["b"] for action in (Action.PAUSE, Action.RESUME, Action.NEXT_STAGE)]
    with pytest.raises(MarlRayError, match="stage 3 of 3 is the last"):
        act(stores, Action.NEXT_STAGE)
    assert seen == [0.1, 0.5, 0.0, 0.5, 1.0]
    act(stores, Action.PROMOTE)
    again = open_stores(url)  # another process
    table = again.experiments.assignment_state("exp")
    assert (table.status, table.weights, table.epoch, table.stage) == (
        ExperimentStatus.PROMOTED,
        {"a": 0, "b": 1},
        7,
        2,
    )
    entries = again.experiments.audit("exp")
    assert [entry.action for entry in entries] == [
        "open",
        "start",
        "next_stage",
        "pause",
        "resume",
        "next_stage",
        "promote",
    ]
    assert [entry.epoch for entry in entries] == list(range(1, 8))
    assert entries[0].before is None
    assert entries[0].after["config"] == gradual(a=1, b=1) | {"autostart": False}
    assert (entries[1].actor, entries[1].reason, entries[1].at > 0) == ("test", "go", True)
    for before, after in pairwise(entries):
        assert after.before == {key: value for key, value in before.after.items() if key != "config"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"status": "archived"}, "ValueError: 'archived' is not a valid ExperimentStatus"),
        ({"config": {"salt": "s"}}, "KeyError: 'arms'"),
        ({"config": {"salt": "s", "arms": {"a": "heavy"}}}, "TypeError: "),
        ({"config": config(a=1, b=1) | {"layer_share": 3}}, "TypeError: "),
    ],
)
def test_an_experiment_that_a_newer_version_has_stored_hides_no_other(url, caplog, values, reason):
    stores = open_stores(url)
    for name in ("exp", "newer", "third"):
        stores.experiments.open(name, config(a=1, b=1))
    experiments = schema.experiments
    with stores.database.write_transaction() as connection:
        revised = {"revision": experiments.c.revision + 1} | values
        connection.execute(sa.update(experiments).where(experiments.c.name == "newer").values(revised))
    assert list(stores.experiments.states()) == ["exp", "third"]
    act(stores, Action.ROLLBACK)
    assert stores.experiments.states()["exp"].rolled_back == {"b"}
    lines = [record.message for record in caplog.records]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"experiment 'newer': this version cannot read what is stored of it: {reason}")
    with pytest.raises(MarlRayError, match=r"^experiment 'newer': this version cannot"):
        stores.experiments.assignment_state("newer")


def test_states_of_all_experiments_are_told_at_once_and_stay_true(url):
    stores, other = open_stores(url), open_stores(url)
    assert (stores.experiments.names(), stores.experiments.states()) == ([], {})
    stores.experiments.open("exp", gradual(a=1, b=1, c=1))
    stores.experiments.open("second", config(a=1, b=1) | {"randomize": "cluster", "endpoint": "game"})

    def agree() -> bool:
        assert stores.experiments.names() == other.experiments.names() == ["exp", "second"]
        assert stores.experiments.states() == {
            name: other.experiments.assignment_state(name) for name in other.experiments.names()
        }
        return True

    assert agree()
    state = stores.experiments.states()["second"]
    assert (state.endpoint, state.randomize, state.block_s) == ("game", "cluster", 600.0)
    assert (stores.experiments.states()["exp"].endpoint, stores.experiments.states()["exp"].created) == (
        "exp",
        stores.experiments.read("exp").created,
    )
    act(other, Action.ROLLBACK, arm="b")
    assert agree() and stores.experiments.states()["exp"].rolled_back == {"b"}
    act(other, Action.ROLLBACK, arm="c")
    assert agree() and stores.experiments.states()["exp"].rolled_back == {"b", "c"}
    other.experiments.open(
        "second", config(a=1, b=1) | {"randomize": "cluster", "endpoint": "game", "on_rollback": "cut"}
    )
    second = stores.experiments.states()["second"]
    assert agree() and (second.on_rollback, second.epoch) == ("cut", 1)
    other.experiments.open("second", config(a=3, b=0) | {"randomize": "cluster", "endpoint": "play"})
    assert agree() and stores.experiments.states()["second"].weights == {"a": 3, "b": 0}


def test_an_endpoint_has_one_open_experiment_at_a_time(url):
    stores = open_stores(url)
    stores.experiments.open("first", config(a=1, b=1) | {"endpoint": "game", "autostart": False})
    refused = (
        r"'second': endpoint 'game' still has experiment 'first' \(draft\); promote, roll back or stop that one first"
    )
    with pytest.raises(MarlRayError, match=refused):
        stores.experiments.open("second", config(a=1, b=1) | {"endpoint": "game"})
    assert stores.experiments.names() == ["first"]
    with pytest.raises(MarlRayError, match="endpoint 'game' still has"):
        stores.experiments.open("game", config(a=1, b=1))
    stores.experiments.open("first", config(a=2, b=1) | {"endpoint": "game"})
    act(stores, Action.STOP, "first")
    stores.experiments.open("second", config(a=1, b=1) | {"endpoint": "game"})
    stores.experiments.open("first", config(a=2, b=2) | {"endpoint": "game"})  # it stays stopped
    stores.experiments.open("elsewhere", config(a=1, b=1))
    with pytest.raises(MarlRayError, match="endpoint 'game' still has experiment 'second'"):
        stores.experiments.open("elsewhere", config(a=1, b=1) | {"endpoint": "game"})
    layered = {"endpoint": "layered", "layer": "l"}
    stores.experiments.open("low", config(a=1, b=1) | layered | {"layer_share": [0.0, 0.5]})
    stores.experiments.open("high", config(a=1, b=1) | layered | {"layer_share": [0.5, 1.0]})
    with pytest.raises(MarlRayError, match="endpoint 'layered' still has experiment 'low'"):
        stores.experiments.open("middle", config(a=1, b=1) | layered | {"layer_share": [0.4, 0.5]})
    with pytest.raises(MarlRayError, match="endpoint 'layered' still has experiment"):
        stores.experiments.open("middle", config(a=1, b=1) | layered | {"layer": "m", "layer_share": [0.4, 0.5]})


def test_an_experiment_of_one_arm_ends_with_the_one_that_succeeds_it(url):
    stores = open_stores(url)
    game = {"endpoint": "game"}
    stores.experiments.open("first", config(a=1) | game)
    stores.experiments.open("bad", config(a=1, b=1) | {"endpoint": "other"})
    act(stores, Action.ROLLBACK, "bad", arm="b")
    with pytest.raises(MarlRayError, match="rolled back"):  # whatever refuses the new one leaves the old one as it is
        stores.experiments.open("second", config(a=1, b=1) | game, succeeds="first")
    assert stores.experiments.assignment_state("first").status is ExperimentStatus.RUNNING
    assert "second" not in stores.experiments.names()
    stores.experiments.open("second", config(a=1, c=1) | game, actor="ada", succeeds="first")
    assert stores.experiments.assignment_state("first").status is ExperimentStatus.STOPPED
    last = stores.experiments.audit("first")[-1]
    assert (last.action, last.actor, last.reason) == ("stop", "ada", "succeeded by 'second'")
    for other in ("first", "second", "bad", "none"):  # over, of two arms, at another endpoint, unknown
        with pytest.raises(
            MarlRayError, match=f"^succeeds: expected an open experiment of one arm at 'game', got '{other}'"
        ):
            stores.experiments.open("third", config(a=1) | game, succeeds=other)
    assert stores.experiments.assignment_state("second").status is ExperimentStatus.RUNNING


def test_each_population_is_an_epoch_and_remembered(url):
    stores = open_stores(url)
    populations = [{}, {"share": 0.5, "attributes": {"x": ["a", True, 1.5]}}, {"share": 0.2, "attributes": {}}]
    for epoch, population in enumerate(populations, 1):
        kept_config = config(a=1, b=1) | ({"population": population} if population else {})
        for _ in range(2):
            assert stores.experiments.open("exp", kept_config).epoch == epoch
        assert stores.experiments.assignment_state("exp").population == population_of(kept_config)
        assert stores.experiments.epoch_history("exp").populations == {
            population_of({"population": earlier}) for earlier in populations[:epoch]
        }
    stores.experiments.open("exp", config(a=1, b=1) | {"salt": "another"})
    assert stores.experiments.epoch_history("exp") is None and stores.experiments.epoch_history("nobody") is None


def _open(url: str, name: str, results: Any) -> None:
    stores = open_stores(url)
    try:
        stores.experiments.open(name, config(a=1, b=1) | {"endpoint": "game"})
        results.append(name)
    except MarlRayError as error:
        results.append(str(error))
    stores.close()


def test_of_experiments_opened_together_on_an_endpoint_one_is(url):
    stores = open_stores(url)
    results: list[str] = []
    threads = [threading.Thread(target=_open, args=(url, f"e{k}", results)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(stores.experiments.names()) == 1
    assert sorted("still has" in result for result in results) == [False, True, True, True]


def test_production_is_the_last_winner_or_else_the_control(url):
    stores = open_stores(url)

    def opened(name: str, **weights: float) -> None:
        data = config(**weights) | {"endpoint": "game"}
        data["arms"][next(iter(weights))]["bundle"] = "runs/bundle"
        stores.experiments.open(name, data)

    assert stores.experiments.production("game") is None
    opened("first", a=1, b=1)
    assert stores.experiments.production("game") == Production("first", "a", "runs/bundle", "digest-a")
    act(stores, Action.PROMOTE, "first")
    assert stores.experiments.production("game") == Production("first", "b", "digest-b", "digest-b")
    opened("second", b=1, c=1)
    assert (
        stores.experiments.production("game").experiment == "second"
        and stores.experiments.production("game").arm == "b"
    )
    act(stores, Action.PROMOTE, "second")
    assert stores.experiments.production("game").arm == "c"
    act(stores, Action.ROLLBACK, "second")
    assert stores.experiments.production("game").arm == "b"
    opened("third", b=1, d=1)
    act(stores, Action.STOP, "third")
    assert stores.experiments.production("game") == Production("third", "b", "runs/bundle", "digest-b")


def test_the_database_itself_keeps_audit_and_marks(url, stores):
    act(stores, Action.ROLLBACK)
    raw = sa.create_engine(url)
    for statement in (
        "UPDATE audit SET reason = 'none'",
        "DELETE FROM audit",
        "UPDATE arms SET rolled_back_at = NULL",
        "UPDATE arms SET digest = 'other'",
        "DELETE FROM arms",
    ):
        with pytest.raises(sa.exc.DBAPIError, match=r"append-only|stays rolled back"), raw.begin() as connection:
            connection.execute(sa.text(statement))
    raw.dispose()


def test_a_change_names_the_epoch_it_was_decided_on(stores):
    stores.experiments.open("exp", gradual(a=1, b=1))
    with pytest.raises(StaleEpochError, match="next_stage was decided on epoch 1, 'exp' is at 2"):
        act(stores, Action.NEXT_STAGE, epoch=1)
    with pytest.raises(MarlRayError, match="expected the epoch that next_stage was decided on"):
        act(stores, Action.NEXT_STAGE, epoch=None)
    with pytest.raises(StaleEpochError):
        act(stores, Action.ROLLBACK, epoch=1)
    assert act(stores, Action.PAUSE, epoch=None).epoch == 3
    with pytest.raises(MarlRayError, match="unknown experiment 'none'"):
        stores.experiments.change("none", Action.STOP, epoch=None, actor="", reason="")
    with pytest.raises(MarlRayError, match="unknown experiment 'none'"):
        stores.experiments.assignment_state("none")


def test_of_two_processes_that_advance_one_wins_every_time(url):
    stages = [k / 10 for k in range(1, 11)]
    stores = open_stores(url)
    stores.experiments.open("exp", config(a=1, b=1) | {"strategy": "gradual", "stages": stages})
    context = multiprocessing.get_context("spawn")
    together, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=advance, args=(url, 9, together, results, number)) for number in range(2)]
    for process in both:
        process.start()
    numbers = sorted(results.get(timeout=60) for _ in range(18))
    for process in both:
        process.join(60)
    assert numbers == sorted((turn, result) for turn in range(9) for result in ("won", "stale"))
    assert (stores.experiments.assignment_state("exp").stage, stores.experiments.assignment_state("exp").epoch) == (
        9,
        10,
    )
    assert [entry.epoch for entry in stores.experiments.audit("exp")] == list(range(1, 11))
    stores.close()


STEPS = st.one_of(
    st.tuples(st.sampled_from(list(Action)), st.sampled_from([None, "b", "c"]), st.sampled_from([0, 0, 0, -1, None])),
    st.tuples(
        st.just("open"), st.sampled_from(["ab", "abc", "acb", "bac"]), st.sampled_from(["ab", "gradual", "shadow"])
    ),
    st.tuples(st.just("restart"), st.none(), st.none()),
)


@settings(max_examples=25)
@given(steps=st.lists(STEPS, max_size=25))
def test_nothing_that_is_done_gives_a_rolled_back_arm_traffic(make_url, steps):
    """Actions, stale ones among them, changed configs and restarts; after each one the store is looked at afresh."""
    url = make_url()
    stores = open_stores(url)
    stores.experiments.open("exp", gradual(a=1, b=1, c=1))
    barred: set[str] = set()
    epoch, entries = 1, 1
    for what, choice, detail in steps:
        before = stores.experiments.read("exp")
        try:
            if what == "restart":
                stores.close()
                stores = open_stores(url)
            elif what == "open":
                opened = gradual(**dict.fromkeys(choice, 1.0 + len(steps))) | {"strategy": detail}
                for part in opened["arms"].values():
                    part["allow_rolled_back"] = True
                stores.experiments.open("exp", opened)
            else:
                decided = None if detail is None else epoch + detail
                stores.experiments.change("exp", what, epoch=decided, actor="test", reason="", arm=choice)
                if what is Action.ROLLBACK:
                    barred |= {choice} if choice else set(before.plan.treatments)
        except MarlRayError:
            assert stores.experiments.read("exp") == before
        table, after = stores.experiments.assignment_state("exp"), stores.experiments.read("exp")
        assert table.rolled_back == barred
        assert not any(table.weights.get(arm) for arm in barred)
        assert not barred & set(table.shadows)
        assigned = AssignmentTable(table.weights, table.salt, table.epoch)
        assert not barred & {assigned.assign(f"u{i}").arm for i in range(10)}
        same_traffic = (after.state, after.weights) == (before.state, before.weights)
        assert table.epoch == epoch if same_traffic else table.epoch == epoch + 1
        entries += after != before
        audit = stores.experiments.audit("exp")
        assert len(audit) == entries
        assert (audit[-1].epoch, audit[-1].after["weights"]) == (table.epoch, table.weights)
        epoch = table.epoch
    stores.close()
